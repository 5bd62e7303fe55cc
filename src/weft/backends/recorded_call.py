"""Calls of an implementation that are recorded once, and then repeated by one generated function.

An implementation decides much before it launches: views, vector widths, a configuration, a grid, buffers. All
of it follows from the shapes, strides, dtypes and device of its tensors, from their alignment, and from the
scalars. :func:`record` runs an implementation once and notes which memory it allocates, and which kernels it
launches with which addresses. generated_call.py writes a function that does the same for tensors like these.

A call that does anything else is not repeated: an operation of PyTorch's other than a view or an allocation,
a launch that was not seen, an address in memory that is neither an input nor allocated by the call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.backends import nvrtc

ALIGNMENT = 32  # bytes; inputs of a recorded call begin at multiples, the widest load's of any kernel

aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# Functions of inputs that are called as they are, before the launches.
OPERATIONS = {aten.div.Tensor}
ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}


class NotRecordableError(Exception):
    """The call does something that a generated function does not repeat."""


@dataclass(frozen=True)
class Address:
    """An address of a call: ``offset`` bytes behind the start of an input, or of an allocated buffer."""

    is_input: bool
    index: int
    offset: int


@dataclass(frozen=True)
class Launch:
    """One launch: of ``kernel`` with ``shape`` (grid, block, shared memory, overlap).

    ``parameters`` are scalars and addresses. For a structure they are None, ``structure`` has its bytes, and
    ``fields`` its addresses: offset in the structure, address, and the function that makes a tensor map.
    """

    kernel: nvrtc.Kernel
    shape: tuple[Any, ...]
    parameters: tuple[Any, ...] | None
    structure: bytes = b""
    fields: tuple[tuple[int, Address, Callable[[int], ctypes.Structure] | None], ...] = ()


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor of Triton as an argument: ``make(pointer)`` is the map for an address."""

    address: Address
    make: Callable[[int], Any]


@dataclass(frozen=True)
class Pending:
    """A descriptor whose address was not looked up so far."""

    pointer: int
    make: Callable[[int], Any]


@dataclass(frozen=True)
class TritonLaunch:
    """One launch of Triton's: ``launch(*sizes, stream, *head, *arguments)``.

    ``arguments`` are addresses, descriptors, and anything else as it is.
    """

    launch: Callable[..., None]
    device: int
    sizes: tuple[int, int, int]
    head: tuple[Any, ...]
    arguments: tuple[Any, ...]


@dataclass
class Recording:
    """Record of a call: buffers in the order of their allocation, and launches in their order.

    ``zeroed`` are the indices of the buffers that are zeros. ``operations`` has the buffers that PyTorch
    computes: the function and the indices of its inputs. ``output`` is what the call returned.
    """

    inputs: tuple[torch.Tensor, ...]
    buffers: list[torch.Tensor] = field(default_factory=list)
    zeroed: set[int] = field(default_factory=set)
    operations: dict[int, tuple[Any, list[int]]] = field(default_factory=dict)
    launches: list[Launch | TritonLaunch] = field(default_factory=list)
    output: Any = None

    def locate(self, x: Any) -> tuple[bool, int]:
        """Return whether a tensor is an input, and its index among the inputs or the buffers.

        A buffer may be returned as another view of all of its memory. Raises NotRecordableError for any other
        tensor.
        """
        for index, known in enumerate(self.inputs):
            if x is known:
                return True, index
        for index, buffer in enumerate(self.buffers):
            same_start = isinstance(x, torch.Tensor) and x.data_ptr() == buffer.data_ptr()
            if same_start and x.dtype == buffer.dtype and extent(x) == extent(buffer) and x.numel():
                return False, index
            if x is buffer:
                return False, index
        raise NotRecordableError("an output is neither an input nor allocated")


class Recorder(TorchDispatchMode):
    """Notes allocations by PyTorch, and launches, of one call in one thread."""

    def __init__(self, inputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.recording = Recording(inputs)
        self.failure: str | None = None
        # By its bytes, the address of a tensor map and the function that makes it for another one.
        self.maps: dict[bytes, tuple[int, Callable[[int], ctypes.Structure]]] = {}
        self._views: list[Any] = []  # kept, so that no address is used twice
        self._ranges = [(x.data_ptr(), x.data_ptr() + max(extent(x), 1)) for x in inputs]

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS or func in ZEROS:
            if func in ZEROS:
                self.recording.zeroed.add(len(self.recording.buffers))
            self.recording.buffers.append(output)
        elif getattr(func, "is_view", False):
            self._views.append(output)
        elif func in OPERATIONS and not self.recording.launches:
            places = [next((i for i, x in enumerate(self.recording.inputs) if x is a), -1) for a in args]
            if kwargs or -1 in places:
                self.fail(f"it calls {func} with other tensors than its inputs")
            self.recording.operations[len(self.recording.buffers)] = func, places
            self.recording.buffers.append(output)
        else:
            self.fail(f"it calls {func}")
        return output

    def address(self, value: int) -> Address:
        """Return where an address lies."""
        for index, buffer in enumerate(self.recording.buffers):
            start = buffer.data_ptr()
            if start <= value < start + max(extent(buffer), 1):
                return Address(False, index, value - start)
        around = [i for i, (start, end) in enumerate(self._ranges) if start <= value < end]
        # Inputs may be interleaved, as queries, keys and values of one product are: then the first element
        # tells them apart.
        exact = [i for i in around if self._ranges[i][0] == value]
        candidates = exact or around
        # A tensor that is passed twice is so in every call that the generated function is for.
        if len({id(self.recording.inputs[i]) for i in candidates}) != 1:
            raise NotRecordableError("an address lies in no input or in several, and in no buffer")
        index = candidates[0]
        return Address(True, index, value - self._ranges[index][0])

    def scalar(self, value: Any) -> Any:
        """Return a number that is the same in each call, or the address that it is."""
        if not isinstance(value, int) or abs(value) < 1 << 32:
            return value
        return self.address(value)

    def launch(self, kernel: nvrtc.Kernel, shape: tuple[Any, ...], arguments: Sequence[Any]) -> None:
        """Note a launch."""
        try:
            if arguments and isinstance(arguments[0], ctypes.Structure):
                structure = arguments[0]
                fields = tuple(self._fields_of(structure, 0))
                self.recording.launches.append(Launch(kernel, shape, None, bytes(structure), fields))
                return
            parameters = []
            for argument in arguments:
                if hasattr(argument, "data_ptr"):
                    pointer = argument.data_ptr()
                    parameters.append(self.address(pointer) if pointer else 0)
                else:
                    parameters.append(self.scalar(argument))
            self.recording.launches.append(Launch(kernel, shape, tuple(parameters)))
        except NotRecordableError as error:
            self.fail(str(error))

    def triton_launch(
        self, launch: Any, device: int, sizes: Any, head: tuple[Any, ...], arguments: Sequence[Any]
    ) -> None:
        """Note a launch by Triton; of ``arguments``, tensors and descriptors are those of the call."""
        try:
            noted = tuple(map(self._argument, arguments))
            self.recording.launches.append(TritonLaunch(launch, device, tuple(sizes), head, noted))
        except NotRecordableError as error:
            self.fail(str(error))

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Pending):
            return Descriptor(self.address(argument.pointer), argument.make)
        if hasattr(argument, "data_ptr"):
            pointer = argument.data_ptr()
            return self.address(pointer) if pointer else 0
        if isinstance(argument, tuple):
            raise NotRecordableError("an argument is a tuple")
        return self.scalar(argument)

    def _fields_of(self, structure: ctypes.Structure, base: int) -> Iterator[tuple[int, Address, Any]]:
        """Yield the addresses in a structure and in the structures in it, as ``Launch.fields``."""
        for name, kind, *_ in structure._fields_:
            value, offset = getattr(structure, name), base + getattr(type(structure), name).offset
            if isinstance(value, ctypes.Structure):
                content = bytes(value)
                if content in self.maps:
                    pointer, make = self.maps[content]
                    yield offset, self.address(pointer), make
                elif any(content):
                    yield from self._fields_of(value, offset)
            elif isinstance(value, ctypes.Array):
                if any(isinstance(self.scalar(v), Address) for v in value):
                    raise NotRecordableError("an array in a structure has an address")
            elif kind is ctypes.c_void_p:
                if value:
                    yield offset, self.address(value), None
            elif isinstance(self.scalar(value), Address):
                raise NotRecordableError(f"{name} of a structure is an address, but no pointer")


def extent(x: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor."""
    if not x.numel():
        return 0
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return span * x.element_size()


# Context managers inside of which launches by other backends are noted (triton_jit.py).
noting: list[Callable[[], AbstractContextManager[None]]] = []
# The functions that a profiler asks to be called at each launch: then the implementation runs as it is.
launch_hooks: list[Any] = []


@contextmanager
def _active(recorder: Recorder) -> Iterator[None]:
    thread = threading.get_ident()
    nvrtc.recorders[thread] = recorder
    try:
        with ExitStack() as stack:
            for note in noting:
                stack.enter_context(note())
            yield
    finally:
        del nvrtc.recorders[thread]


def record(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Recording | None:
    """Call ``function(*inputs)`` and return what it did, or None if no generated function can repeat that.

    It launches its kernels: the outputs are a call's, in memory that nothing else uses.
    """
    if any(x.data_ptr() & (ALIGNMENT - 1) for x in inputs):
        return None
    recorder = Recorder(inputs)
    with torch.no_grad(), _active(recorder), recorder:
        output = function(*inputs)
    recording = recorder.recording
    recording.output = output
    written = {a.index for launch in recording.launches for a in addresses_of(launch) if not a.is_input}
    # Memory that no launch was seen to take is filled by a launch that was not seen.
    taken = written | set(recording.operations)
    unseen = any(b.numel() and i not in taken for i, b in enumerate(recording.buffers))
    return None if recorder.failure or unseen or not recording.launches else recording


def addresses_of(launch: Launch | TritonLaunch) -> list[Address]:
    if isinstance(launch, TritonLaunch):
        arguments = [a.address if isinstance(a, Descriptor) else a for a in launch.arguments]
        return [a for a in arguments if isinstance(a, Address)]
    parameters = launch.parameters or ()
    return [*(p for p in parameters if isinstance(p, Address)), *(address for _, address, _ in launch.fields)]
