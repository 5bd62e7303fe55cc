"""Trace of Triton kernels in Triton's interpreter: loads and stores, accesses out of bounds, races.

:func:`tracing` replaces the functions by which the interpreter loads, stores and starts programs. A kernel
gets artificial addresses. They say to which argument a pointer belongs, however far it is out of bounds, and
are translated to real ones for the access itself. An access out of bounds is recorded and not made: a load
gets 0.

The package triton-viz hooks into the interpreter likewise. Its release 3.0 has no check for races between
programs, and needs pyarrow, z3, flask, a tunnel to the internet and pre-commit, so that it is not used.
"""

from __future__ import annotations

import inspect
import linecache
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import triton

from weft.core.errors import WeftError
from weft.lab.program_races import DataRace, Touches

# Bits of an artificial address: the number of the argument from bit 52 on. Real addresses have 47 bits.
# The base lies in the middle of its range, so that an offset below 0 stays with its argument.
OWNER_SHIFT, MIDDLE = 52, 1 << 51
ALIGNMENT = 4096  # an artificial address is as aligned as the real one, up to this many bytes
INTERNAL = (str(Path(triton.__file__).parent), __file__)

Program = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of a kernel; ``tensor`` is None for a number or a constexpr."""

    name: str
    value: Any
    tensor: torch.Tensor | None
    is_constexpr: bool


@dataclass(frozen=True, kw_only=True)
class TracedTensor:
    """A tensor that a kernel got: its artificial address, and which elements it and its storage have.

    Offsets count elements from the tensor's first one; ``low`` and ``high`` bound those of its storage.
    """

    name: str
    base: int
    address: int
    itemsize: int
    low: int
    high: int
    elements: np.ndarray  # by offset from the first element: is it an element of the view?

    def is_gap(self, offsets: np.ndarray) -> np.ndarray:
        """Return which offsets lie in the storage without being an element of the tensor."""
        inside = (offsets >= self.low) & (offsets < self.high)
        known = (offsets >= 0) & (offsets < len(self.elements))
        known[known] = self.elements[offsets[known]]
        return inside & ~known


@dataclass(frozen=True, kw_only=True)
class Access:
    """A load, store or atomic of one program. The arrays have the shape of the block of pointers.

    ``offsets`` count elements from the tensor's first one. ``active`` is the mask; ``outside`` are active
    offsets beyond the storage, ``gaps`` active ones within it that are no element of the tensor.
    """

    kind: str
    file: str
    line: int
    tensor: str
    offsets: np.ndarray
    active: np.ndarray
    values: np.ndarray
    outside: np.ndarray
    gaps: np.ndarray

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


@dataclass(kw_only=True)
class OutOfBounds:
    """Accesses of one line to one tensor beyond its storage, with one example."""

    kernel: str
    kind: str
    line: int
    tensor: str
    program: Program
    offset: int
    size: int  # elements from the tensor's first one to the end of its storage
    elements: int = 0
    programs: int = 0


@dataclass(kw_only=True)
class Launch:
    """A launch of a kernel: its grid and arguments, and the accesses of the traced program."""

    kernel: str
    file: str
    first_line: int
    arguments: list[Argument]
    grid: Program = (1, 1, 1)
    tensors: list[TracedTensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    touches: Touches = field(default_factory=Touches)
    races: list[DataRace] = field(default_factory=list)
    out_of_bounds: dict[tuple[str, int, str], OutOfBounds] = field(default_factory=dict)
    gaps: int = 0
    atomics: bool = False

    @property
    def programs(self) -> int:
        return math.prod(self.grid)


class Stopped(Exception):
    """The user left the debugger."""


class Trace:
    """The launches of one call, and the accesses of one program of the launch that is asked for.

    ``kernel`` is a part of the kernel's name; the first launch that has it is ``selected``. ``line`` ends the
    trace where the program first reaches it, with the ``variables`` there. ``start_debugger(launch)`` is
    called right before the program runs, and may set a trace function.
    """

    def __init__(
        self,
        program: Sequence[int],
        *,
        kernel: str = "",
        line: int | None = None,
        start_debugger: Callable[[Launch], None] | None = None,
    ) -> None:
        self.program: Program = (*program, 0, 0, 0)[:3]  # type: ignore[assignment]
        self.kernel = kernel
        self.line = line
        self.start_debugger = start_debugger
        self.launches: list[Launch] = []
        self.selected: Launch | None = None
        self.accesses: list[Access] = []
        self.variables: dict[str, Any] | None = None
        self.lines: set[int] = set()  # that the program reached, if a line is asked for
        self._current: Program = (0, 0, 0)
        self._is_traced = False
        self._former: Any = None

    def start_launch(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        code = executor.fn.__code__
        known = inspect.getfullargspec(executor.fn).args
        bound = inspect.getcallargs(executor.fn, *args, **{k: v for k, v in kwargs.items() if k in known})
        arguments = [
            Argument(name=n, value=v, tensor=_as_tensor(v), is_constexpr=n in executor.constexprs)
            for n, v in bound.items()
        ]
        name = executor.fn.__name__
        launch = Launch(
            kernel=name, file=code.co_filename, first_line=code.co_firstlineno, arguments=arguments
        )
        launch.names = [t for a in arguments if not a.is_constexpr for t in _tensor_names(a.name, a.value)]
        self.launches.append(launch)
        if self.selected is None and self.kernel in name:
            self.selected = launch

    def add_tensor(self, argument: Any, converted: Any) -> None:
        """Give a tensor that the interpreter has converted an artificial address."""
        launch = self.launches[-1]
        tensor, address = _as_tensor(argument), int(converted.handle.data.item())
        assert tensor is not None
        itemsize = max(1, converted.dtype.element_ty.primitive_bitwidth // 8)
        storage = tensor.untyped_storage()
        before = (address - storage.data_ptr()) // itemsize if storage.nbytes() else 0
        base = ((len(launch.tensors) + 1) << OWNER_SHIFT) + MIDDLE + address % ALIGNMENT
        launch.tensors.append(
            TracedTensor(
                name=launch.names[len(launch.tensors)],
                base=base,
                address=address,
                itemsize=itemsize,
                low=-before,
                high=storage.nbytes() // itemsize - before,
                elements=_elements(tensor),
            )
        )
        converted.handle.data = np.array([base], dtype=np.uint64)

    def set_grid(self, grid: Program) -> None:
        launch = self.launches[-1]
        launch.grid = grid
        if launch is self.selected and any(p >= n for p, n in zip(self.program, grid, strict=True)):
            expected = f"below {','.join(map(str, grid))}, the grid of {launch.kernel}"
            got = ",".join(map(str, self.program))
            raise WeftError("--program", expected=expected, got=got)

    def start_program(self, program: Program) -> None:
        self.end_program()
        self._current = program
        launch = self.launches[-1]
        if launch is not self.selected or program != self.program:
            return
        self._is_traced = True
        self._former = sys.gettrace()
        if self.start_debugger is not None:
            self.start_debugger(launch)
        elif self.line is not None:
            sys.settrace(self._stop_at_line)

    def end_program(self) -> None:
        if self._is_traced:
            sys.settrace(self._former)
            self._is_traced = False

    def end_launch(self) -> None:
        self.end_program()
        launch = self.launches[-1]
        launch.races = launch.touches.races(
            launch.grid, [(t.name, t.address, t.itemsize, t.low, t.high) for t in launch.tensors]
        )
        launch.touches = Touches()  # of large cases many bytes

    def _stop_at_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace function of the program: follow the code of the kernel's file only."""
        assert self.selected is not None
        if frame.f_code.co_filename != self.selected.file:
            return None
        if event == "line":
            self.lines.add(frame.f_lineno)
            if frame.f_lineno == self.line and self.variables is None:
                self.variables = dict(frame.f_locals)
        return self._stop_at_line

    def resolve(self, pointers: np.ndarray) -> tuple[np.ndarray, TracedTensor | None, np.ndarray]:
        """Return real addresses, the tensor that owns the first pointer, and element offsets.

        A pointer that the kernel made of an integer has no owner: its offsets are addresses.
        """
        launch = self.launches[-1]
        owners = pointers >> np.uint64(OWNER_SHIFT)
        real = pointers.copy()
        offsets = pointers.astype(np.int64)
        for owner in np.unique(owners):
            if 0 < owner <= len(launch.tensors):
                tensor = launch.tensors[int(owner) - 1]
                at = owners == owner
                distance = (pointers[at] - np.uint64(tensor.base)).astype(np.int64)
                offsets[at] = distance // tensor.itemsize
                real[at] = np.uint64(tensor.address) + distance.astype(np.uint64)
        first = int(owners.flat[0]) if owners.size else 0
        owned = launch.tensors[first - 1] if 0 < first <= len(launch.tensors) else None
        return real, owned, offsets

    def record(
        self, kind: str, pointers: Any, mask: Any, perform: Callable[[Any, Any], Any], stored: Any = None
    ) -> Any:
        """Make an access by ``perform(addresses, mask)`` where it is in bounds, and record it."""
        launch = self.launches[-1]
        active = np.broadcast_to(np.asarray(mask.data, dtype=bool), pointers.data.shape)
        real, tensor, offsets = self.resolve(pointers.data)
        outside = np.zeros(offsets.shape, dtype=bool)
        gaps = outside
        if tensor is not None:
            outside = active & ((offsets < tensor.low) | (offsets >= tensor.high))
            gaps = active & tensor.is_gap(offsets)
        handle = type(pointers)
        result = perform(handle(real, pointers.dtype), handle(active & ~outside, triton.language.int1))
        values = np.asarray(result.data if stored is None else stored.data)
        values = np.broadcast_to(values, offsets.shape)
        file, line = _kernel_line()
        launch.gaps += int(gaps.sum())
        launch.atomics |= kind == "atomic"
        name = tensor.name if tensor is not None else "(an address)"
        if outside.any() and tensor is not None:
            self._add_out_of_bounds(launch, kind, line, tensor, offsets[outside])
        safe = active & ~outside
        launch.touches.add(kind, line, name, self._current, real[safe], values[safe])
        if self._is_traced and self.variables is None:
            self.accesses.append(
                Access(
                    kind=kind,
                    file=file,
                    line=line,
                    tensor=name,
                    offsets=offsets,
                    active=active,
                    values=np.array(values),
                    outside=outside,
                    gaps=gaps,
                )
            )
        return result

    def _add_out_of_bounds(
        self, launch: Launch, kind: str, line: int, tensor: TracedTensor, offsets: np.ndarray
    ) -> None:
        key = (kind, line, tensor.name)
        if key not in launch.out_of_bounds:
            launch.out_of_bounds[key] = OutOfBounds(
                kernel=launch.kernel,
                kind=kind,
                line=line,
                tensor=tensor.name,
                program=self._current,
                offset=int(offsets[0]),
                size=tensor.high,
            )
        launch.out_of_bounds[key].elements += int(offsets.size)
        launch.out_of_bounds[key].programs += 1


def _as_tensor(value: Any) -> torch.Tensor | None:
    from triton.runtime.interpreter import _unwrap_tensor

    if not hasattr(value, "data_ptr"):
        return None
    tensor: torch.Tensor = _unwrap_tensor(value)
    return tensor


def _tensor_names(name: str, value: Any) -> Iterator[str]:
    """Yield the names of the tensors in an argument, in the order in which the interpreter converts them."""
    if hasattr(value, "data_ptr"):
        yield name
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _tensor_names(f"{name}[{index}]", item)
    elif hasattr(value, "base") and hasattr(value, "block_shape"):  # a tensor descriptor
        yield from _tensor_names(f"{name}.base", value.base)


def _elements(tensor: torch.Tensor) -> np.ndarray:
    """Return which offsets from a tensor's first element are elements of it."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    flags = torch.zeros(reach if tensor.numel() else 0, dtype=torch.bool)
    flags.as_strided(tensor.shape, tensor.stride()).fill_(True)
    elements: np.ndarray = flags.numpy()
    return elements


def _kernel_line() -> tuple[str, int]:
    """Return the file and line of the innermost frame that belongs neither to Triton nor to this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(INTERNAL):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Record the launches of Triton kernels in this block; raises :class:`Stopped` if the user ends pdb."""
    from bdb import BdbQuit

    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError

    originals = _patch(trace, interpreter)
    try:
        yield
    except InterpreterError as error:
        cause = error.__cause__
        while isinstance(cause, InterpreterError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, BdbQuit):
            raise Stopped from None
        if isinstance(cause, WeftError):
            raise cause from None
        raise WeftError(
            f"{trace.launches[-1].kernel} raised an exception in the interpreter",
            got=f"{type(cause).__name__ if cause else 'InterpreterError'}: {cause or error}",
            hint=f"line {_line_of(cause, trace.launches[-1].file)} of {trace.launches[-1].file}",
        ) from error
    finally:
        trace.end_program()
        for owner, name, function in originals:
            setattr(owner, name, function)


def _line_of(error: BaseException | None, file: str) -> int:
    """Return the last line of a file in an exception's traceback; 0 if there is none."""
    line, at = 0, error.__traceback__ if error else None
    while at is not None:
        line = at.tb_lineno if at.tb_frame.f_code.co_filename == file else line
        at = at.tb_next
    return line


def _patch(trace: Trace, interpreter: Any) -> list[tuple[Any, str, Any]]:
    """Replace the interpreter's functions; return what was there, to be set again."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    targets = [(builder, n) for n in ("create_masked_load", "create_masked_store", "create_atomic_cas")]
    targets += [(builder, n) for n in ("create_atomic_rmw", "set_grid_idx", "set_grid_dim")]
    targets += [(executor, "__call__"), (interpreter, "_implicit_cvt")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in targets]
    load, store, cas, rmw, set_index, set_dim, launch, convert = (f for _, _, f in originals)

    def masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *more: Any, **options: Any) -> Any:
        return trace.record("load", ptrs, mask, lambda p, m: load(self, p, m, other, *more, **options))

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *more: Any, **options: Any) -> Any:
        return trace.record(
            "store", ptrs, mask, lambda p, m: store(self, p, value, m, *more, **options), value
        )

    def atomic_rmw(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *more: Any) -> Any:
        return trace.record("atomic", ptr, mask, lambda p, m: rmw(self, operation, p, val, m, *more))

    def atomic_cas(self: Any, ptr: Any, cmp: Any, val: Any, *more: Any) -> Any:
        everywhere = type(ptr)(np.ones_like(ptr.data, dtype=bool), triton.language.int1)
        return trace.record("atomic", ptr, everywhere, lambda p, m: cas(self, p, cmp, val, *more))

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        set_index(self, x, y, z)
        trace.start_program((x, y, z))

    def set_grid_dim(self: Any, nx: int, ny: int, nz: int) -> None:
        set_dim(self, nx, ny, nz)
        trace.set_grid((nx, ny, nz))

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        trace.start_launch(self, args, kwargs)
        launch(self, *args, **kwargs)
        trace.end_launch()

    def implicit_cvt(argument: Any) -> Any:
        converted = convert(argument)
        if hasattr(argument, "data_ptr"):
            trace.add_tensor(argument, converted)
        return converted

    replacements = (masked_load, masked_store, atomic_cas, atomic_rmw, set_grid_idx, set_grid_dim)
    for (owner, name), function in zip(targets, (*replacements, run, implicit_cvt), strict=True):
        setattr(owner, name, function)
    return originals
