"""Launch a learner's Triton kernel in Triton's interpreter, and watch every address that it loads or stores.

A grader that launches the kernel itself chooses the sizes, the strides and the blocks. It sees what a result
does not show: an access outside of all tensors, an input that was changed, a use of a masked lane that has no
value.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

# The import also silences the overflows that the interpreter reports.
from weft.backends.triton_jit import INTERPRETED, triton
from weft.core.errors import WeftError
from weft.learn.candidate import Candidate
from weft.learn.grading import Refused, require

# Elements before and after a tensor. A kernel without its mask overruns by less than a block of rows here.
GUARD = 1 << 15
WATCHED = ("create_masked_load", "create_masked_store", "create_atomic_rmw")


class Guarded:
    """A tensor between two guard bands, so that an access beside it meets no memory of anything else."""

    def __init__(self, name: str, values: np.ndarray) -> None:
        self.name = name
        copied = torch.from_numpy(np.array(values))
        self._storage = torch.zeros((copied.numel() + 2 * GUARD,), dtype=copied.dtype)
        self.tensor = self._storage[GUARD : GUARD + copied.numel()].view(copied.shape)
        self.tensor.copy_(copied)
        self._before = self._bytes().clone()

    def _bytes(self) -> torch.Tensor:
        return self._storage.view(torch.uint8)

    @property
    def owner(self) -> Guarded:
        return self

    def numpy(self) -> np.ndarray:
        return self.tensor.numpy()

    @property
    def addresses(self) -> tuple[int, int]:
        """Return the address of the first byte, and of the byte behind the last."""
        start = self.tensor.data_ptr()
        return start, start + self.tensor.numel() * self.tensor.element_size()

    def element(self, address: int) -> int:
        """Return the number of the element at an address; it is negative before the tensor."""
        return (address - self.tensor.data_ptr()) // self.tensor.element_size()

    def check_unchanged(self, case: str) -> None:
        """Raise :class:`Refused` if the kernel has changed this input."""
        changed = self._bytes() != self._before
        if changed.any():
            first = int(changed.nonzero()[0]) // self._storage.element_size() - GUARD
            raise Refused(case, f"the kernel changed its input {self.name}, at element {first}")


@dataclass(frozen=True)
class GuardedView:
    """A view of a guarded tensor: a transpose, a slice."""

    owner: Guarded
    tensor: torch.Tensor


def unwritten(name: str, *shape: int, dtype: Any = np.float32) -> Guarded:
    """Return an output in guarded memory, filled with NaN so that an element left out is seen."""
    return Guarded(name, np.full(shape, np.nan, dtype))


def launch(
    candidate: Candidate,
    name: str,
    grid: tuple[int, ...],
    case: str,
    arguments: Sequence[Any],
    *,
    outputs: Sequence[Guarded],
    **constants: Any,
) -> None:
    """Launch the kernel ``name`` and watch its accesses; then check that its inputs are unchanged.

    An access outside of all tensors, and what the kernel raises, become a reason with the line of the
    learner's file.
    """
    kernel: Any = getattr(candidate.module, name, None)
    require(kernel is not None, "import", f"the file has no {name}; keep the name of the starting file")
    jitted = isinstance(kernel, triton.runtime.KernelInterface)
    require(jitted, "import", f"{name} is no Triton kernel: it needs @triton.jit")
    tensors = [a.owner for a in arguments if isinstance(a, Guarded | GuardedView)]

    def start(*values: Any) -> None:
        with _watched(case, tensors):
            try:
                kernel[grid](*values, **constants)
            except Exception as error:
                _raise_refusal(candidate, error)
                raise

    # A function of the candidate explains what it raises, with the line.
    start_name = f"launch of {name}"
    setattr(candidate.module, start_name, start)
    candidate.function(start_name)(*(getattr(a, "tensor", a) for a in arguments))
    for tensor in tensors:
        if all(tensor is not output for output in outputs):
            tensor.check_unchanged(case)


@contextmanager
def _watched(case: str, tensors: Sequence[Guarded]) -> Iterator[None]:
    """Check the addresses of every load and store of the interpreter while the context is open."""
    builder = interpreter.InterpreterBuilder
    originals: dict[str, Any] = {name: getattr(builder, name, None) for name in WATCHED}
    if not INTERPRETED or None in originals.values():
        hint = "set TRITON_INTERPRET=1, and install a version of Triton that Weft supports"
        raise WeftError("Triton's interpreter", expected="one that can be watched", hint=hint)
    load, store, atomic = originals.values()

    def watched_load(self: Any, pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
        _check_addresses(case, tensors, pointers, mask, "load")
        if other is None and pointers.data.size > 1:
            # A GPU leaves these lanes undefined; the interpreter's zeros would hide that. For a single lane
            # Triton passes None for a value of 0 too, because it asks for the truth of the value.
            dtype = interpreter._get_np_dtype(pointers.get_element_ty())
            floating = np.issubdtype(dtype, np.floating)
            undefined = np.nan if floating else np.iinfo(dtype).min
            values = np.full_like(pointers.data, undefined, dtype=dtype)
            if floating:
                values.reshape(-1)[::2] = np.inf  # a maximum ignores NaN, and a sum of infinities has none
            other = interpreter.TensorHandle(values, pointers.get_element_ty())
        return load(self, pointers, mask, other, *options)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        _check_addresses(case, tensors, pointers, mask, "store")
        return store(self, pointers, value, mask, *options)

    def watched_atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        _check_addresses(case, tensors, pointers, mask, "atomic operation")
        return atomic(self, operation, pointers, value, mask, *options)

    try:
        for name, function in zip(WATCHED, (watched_load, watched_store, watched_atomic), strict=True):
            setattr(builder, name, function)
        yield
    finally:
        for name, original in originals.items():
            setattr(builder, name, original)


def _check_addresses(case: str, tensors: Sequence[Guarded], pointers: Any, mask: Any, access: str) -> None:
    # A mask may be an array of the integers 0 and 1, which would be taken for positions.
    lanes = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
    active = pointers.data[lanes].astype(np.int64)
    outside = np.ones(active.shape, bool)
    for tensor in tensors:
        first, end = tensor.addresses
        outside &= (active < first) | (active >= end)
    if outside.any():
        address = int(active[outside][0])
        nearest = min(tensors, key=lambda t: min(abs(address - a) for a in t.addresses))
        count = nearest.tensor.numel()
        reason = f"the {access} reaches element {nearest.element(address)} of {nearest.name}"
        raise Refused(case, f"{reason}, which has the elements 0 to {count - 1}: the {access} needs a mask")


def _raise_refusal(candidate: Candidate, error: Exception) -> None:
    """Raise the refusal that caused the interpreter's error, with the line of the learner's file."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Refused):
        cause = cause.__cause__
    if isinstance(cause, Refused):
        frames = [*traceback.extract_tb(error.__traceback__), *traceback.extract_tb(cause.__traceback__)]
        lines = [frame.lineno for frame in frames if frame.filename == str(candidate.file)]
        position = f"line {lines[-1]}: " if lines else ""
        raise Refused(cause.check, position + cause.reason) from error
