"""Calls of an implementation that are recorded once, and then repeated by one generated function.

An implementation decides much before it launches: views, vector widths, a configuration, a grid, buffers. All
of it follows from the shapes, strides, dtypes and device of its tensors, from their alignment, and from the
scalars. :func:`record` runs an implementation once and notes which memory it allocates, and which kernels it
launches with which addresses. :func:`generate` writes a Python function that does the same for other tensors
like these: it allocates, writes addresses into the kernels' parameters, and launches.

The function is generated as text, because the host's caches are cold between two steps of a training loop:
each further function, object or dictionary of a call then costs 0.5 to 1 us (docs/use/dispatch.md).

A call that does anything else is not repeated: an operation of PyTorch's other than a view or an allocation,
a launch that was not seen, an address in memory that is neither an input nor allocated by the call.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.backends import nvrtc

ALIGNMENT = 32  # bytes; inputs of a recorded call begin at multiples, the widest load's of any kernel
SCRATCH_ALIGNMENT = 512  # bytes, as PyTorch's allocator has it
MAP_BYTES = 128  # of a tensor map
MAX_MAPS = 64  # by address, of one field of a structure
MAX_STREAMS = 64  # sets of launch configurations of a function, one for each stream

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
    """What a call did: buffers in the order of their allocation, and launches in their order.

    ``zeroed`` are the indices of the buffers that are zeros. ``operations`` has the buffers that PyTorch
    computes: the function and the indices of its inputs. ``output`` is what the call returned.
    """

    inputs: tuple[torch.Tensor, ...]
    buffers: list[torch.Tensor] = field(default_factory=list)
    zeroed: set[int] = field(default_factory=set)
    operations: dict[int, tuple[Any, list[int]]] = field(default_factory=dict)
    launches: list[Launch | TritonLaunch] = field(default_factory=list)
    output: Any = None

    def place(self, x: Any) -> tuple[bool, int]:
        """Return whether a tensor is an input, and its index among the inputs or the buffers.

        A buffer may be returned as another view of all of its memory. Raises NotRecordableError for any other
        tensor.
        """
        for index, known in enumerate(self.inputs):
            if x is known:
                return True, index
        for index, buffer in enumerate(self.buffers):
            same_start = isinstance(x, torch.Tensor) and x.data_ptr() == buffer.data_ptr()
            if same_start and x.dtype == buffer.dtype and _extent(x) == _extent(buffer) and x.numel():
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
        self._ranges = [(x.data_ptr(), x.data_ptr() + max(_extent(x), 1)) for x in inputs]

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
            if start <= value < start + max(_extent(buffer), 1):
                return Address(False, index, value - start)
        around = [i for i, (start, end) in enumerate(self._ranges) if start <= value < end]
        # Inputs may be interleaved, as queries, keys and values of one product are: then the first element
        # tells them apart.
        exact = [i for i in around if self._ranges[i][0] == value]
        candidates = exact or around
        if len(candidates) != 1:
            raise NotRecordableError("an address lies in no input or in several, and in no buffer")
        (index,) = candidates
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


def _extent(x: torch.Tensor) -> int:
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
    written = {a.index for launch in recording.launches for a in _addresses_of(launch) if not a.is_input}
    # Memory that no launch was seen to take is filled by a launch that was not seen.
    taken = written | set(recording.operations)
    unseen = any(b.numel() and i not in taken for i, b in enumerate(recording.buffers))
    return None if recorder.failure or unseen or not recording.launches else recording


def _addresses_of(launch: Launch | TritonLaunch) -> list[Address]:
    if isinstance(launch, TritonLaunch):
        arguments = [a.address if isinstance(a, Descriptor) else a for a in launch.arguments]
        return [a for a in arguments if isinstance(a, Address)]
    parameters = launch.parameters or ()
    return [*(p for p in parameters if isinstance(p, Address)), *(address for _, address, _ in launch.fields)]


# ---- The generated function


class _Structure:
    """A structure of a launch; ``pointers`` are the addresses that it has now."""

    def __init__(self, launch: Launch) -> None:
        self._memory = ctypes.create_string_buffer(launch.structure, len(launch.structure) + 64)
        # Tensor maps begin at multiples of 64 bytes.
        start = ctypes.addressof(self._memory)
        self._start = start
        self._pointer = (ctypes.c_void_p * 1)(start)
        self.address = ctypes.addressof(self._pointer)
        self._fields = [(start + offset, make, {}) for offset, _, make in launch.fields]
        self.pointers: tuple[int, ...] = (0,) * len(self._fields)

    def write(self, pointers: tuple[int, ...]) -> None:
        """Replace the addresses that have changed."""
        for (place, make, maps), pointer, before in zip(self._fields, pointers, self.pointers, strict=True):
            if pointer == before:
                continue
            if make is None:
                ctypes.c_uint64.from_address(place).value = pointer
                continue
            value = maps.get(pointer)
            if value is None:
                if len(maps) >= MAX_MAPS:
                    maps.clear()
                value = maps[pointer] = make(pointer)
            ctypes.memmove(place, ctypes.addressof(value), MAP_BYTES)
        self.pointers = pointers


class _Buffers:
    """Parameters and launch configurations of one call at a time; ``pools`` has free ones by stream.

    One is a tuple: the parameters of all launches, the pool that it goes back to, and for each launch its
    configuration and the address of the addresses of its parameters, or its structure.
    """

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = launches
        # Appending to a list and popping from it are atomic in CPython: two threads never share parameters.
        self.pools: dict[int, list[tuple[Any, ...]]] = {}

    def new(self, stream: int) -> tuple[Any, ...]:
        """Return new parameters for a stream."""
        if stream not in self.pools and len(self.pools) >= MAX_STREAMS:
            self.pools.clear()
        pool = self.pools.setdefault(stream, [])
        parameters = array("Q", [0] * sum(len(launch.parameters or ()) for launch in self._launches))
        start, keep, entries, index = parameters.buffer_info()[0], [], [], 0
        for launch in self._launches:
            grid, block, shared, overlap = launch.shape
            config = launch.kernel._configure((grid, block, shared, overlap, stream))
            entries.append(config.getPtr())
            keep.append(config)
            if launch.parameters is None:
                structure = _Structure(launch)
                entries += [structure.address, structure]
                continue
            count = len(launch.parameters)
            pointers = (ctypes.c_void_p * max(count, 1))(*(start + 8 * (index + i) for i in range(count)))
            for i, value in enumerate(launch.parameters):
                if not isinstance(value, Address):
                    struct.pack_into("<" + nvrtc._format(value), parameters, 8 * (index + i), value)
            keep.append(pointers)
            entries.append(ctypes.addressof(pointers))
            index += count
        return (parameters, pool, *entries, keep)


def _allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return ``allocate(shape, strides, dtype)``: the functions that the code of torch.compile calls."""
    from torch._C._dynamo import guards

    fast = getattr(guards, f"_empty_strided_{device.type}", None)
    if fast is not None:
        return fast  # type: ignore[no-any-return]

    def allocate(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return allocate


@dataclass(frozen=True)
class Template:
    """What surrounds the launches in a generated function.

    ``name`` is the function's; ``before`` are names of arguments before the inputs (``ctx``). ``results`` are
    the tensors that are returned or stored. ``ending`` are the last lines, in which ``{0}`` stands for the
    first of the results. ``fallback`` takes the arguments of the function, for inputs that are not aligned.
    """

    name: str
    fallback: Callable[..., Any]
    results: tuple[torch.Tensor, ...]
    ending: tuple[str, ...]
    before: tuple[str, ...] = ()
    check_device: Callable[[], bool] | None = None


def generate(recording: Recording, template: Template) -> Callable[..., Any]:
    """Return the function that repeats a recording with other inputs, which are like the recorded ones.

    The caller makes sure that they are alike in type, dtype, device, shape and strides. Their alignment is
    looked at by the function itself.
    """
    device = recording.inputs[0].device
    bound: dict[str, Any] = {"fallback": template.fallback, "allocate": _allocator(device)}
    lines: list[str] = []
    names = [f"x{i}" for i in range(len(recording.inputs))]
    _check_inputs(recording, template, names, lines, bound)
    result_names, addresses = _allocate(recording, template, names, lines, bound)
    if recording.launches:
        _launch(recording, addresses, lines, bound)
    lines += [line.format(*result_names) for line in template.ending]
    arguments = ", ".join((*template.before, *names, *(f"{name}={name}" for name in bound)))
    source = "\n    ".join((f"def {template.name}({arguments}):", *lines))
    # Defaults of arguments lie side by side, and are read as fast as local variables.
    exec(compile(source, f"<recorded {template.name}>", "exec"), bound)
    return bound[template.name]  # type: ignore[no-any-return]


def _check_inputs(
    recording: Recording, template: Template, names: list[str], lines: list[str], bound: dict[str, Any]
) -> None:
    """Read the addresses of the inputs; call the fallback if they are not aligned."""
    used = sorted({a.index for one in recording.launches for a in _addresses_of(one) if a.is_input})
    lines += [f"a{i} = {names[i]}.data_ptr()" for i in used]
    conditions = []
    if used:
        conditions.append(f"({' | '.join(f'a{i}' for i in used)}) & {ALIGNMENT - 1}")
    if template.check_device is not None:
        bound["is_current"] = template.check_device
        conditions.append("not is_current()")
    if any(isinstance(launch, TritonLaunch) for launch in recording.launches):
        for i, hooks in enumerate(launch_hooks):
            bound[f"hooks{i}"] = hooks
            conditions.append(f"hooks{i}()")
    if conditions:
        everything = ", ".join((*template.before, *names))
        lines.append(f"if {' or '.join(conditions)}: return fallback({everything})")


def _allocate(
    recording: Recording, template: Template, names: list[str], lines: list[str], bound: dict[str, Any]
) -> tuple[list[str], dict[tuple[bool, int], str]]:
    """Allocate buffers; return the names of the results, and the address of each input and buffer.

    Buffers that are no result are parts of one allocation.
    """
    result_names, of_buffer = [], {}
    for result in template.results:
        is_input, index = recording.place(result)
        if is_input:
            result_names.append(names[index])
            continue
        if index not in of_buffer:
            of_buffer[index] = result
        elif of_buffer[index] is not result:
            raise NotRecordableError("two results share memory")
        result_names.append(f"y{index}")
    addresses = {(True, i): f"a{i}" for i in range(len(names))}
    scratch = 0
    for index, buffer in enumerate(recording.buffers):
        if index in recording.operations:
            function, places = recording.operations[index]
            bound[f"f{index}"] = function._op
            lines.append(f"y{index} = f{index}({', '.join(names[i] for i in places)})")
            addresses[False, index] = f"b{index}"
            lines.append(f"b{index} = y{index}.data_ptr()")
        elif index in of_buffer or index in recording.zeroed:
            like = of_buffer.get(index, buffer)
            bound[f"t{index}"] = like.dtype
            lines.append(f"y{index} = allocate({tuple(like.shape)}, {like.stride()}, t{index})")
            if index in recording.zeroed:
                lines.append(f"y{index}.zero_()")
            addresses[False, index] = f"b{index}"
            lines.append(f"b{index} = y{index}.data_ptr()")
        elif buffer.numel():
            addresses[False, index] = f"s + {scratch}"
            scratch += math.ceil(_extent(buffer) / SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        else:
            addresses[False, index] = "0"
    if scratch:
        bound["byte"] = torch.uint8
        lines += [f"scratch = allocate(({scratch},), (1,), byte)", "s = scratch.data_ptr()"]
    return result_names, addresses


def _launch(
    recording: Recording, addresses: dict[tuple[bool, int], str], lines: list[str], bound: dict[str, Any]
) -> None:
    """Write the parameters, and launch."""
    launches = recording.launches
    ours = [launch for launch in launches if isinstance(launch, Launch)]
    first = launches[0]
    device = first.device if isinstance(first, TritonLaunch) else first.kernel.device
    bound["stream_of"] = nvrtc._current_stream()
    lines.append(f"stream = stream_of({device})")

    def text(address: Address) -> str:
        start = addresses[address.is_input, address.index]
        return f"{start} + {address.offset}" if address.offset else start

    if ours:
        _write_parameters(ours, text, lines, bound)
    index = 0
    for i, launch in enumerate(launches):
        if isinstance(launch, TritonLaunch):
            lines += _triton_lines(i, launch, text, bound)
            continue
        lines.append(f"status = launcher(c{index}, {launch.kernel.function}, p{index}, None)")
        lines.append(f"if status: again({index}, status, c{index}, p{index})")
        index += 1
    if ours:
        lines.append("pool.append(call)")


def _write_parameters(
    launches: Sequence[Launch], text: Callable[[Address], str], lines: list[str], bound: dict[str, Any]
) -> None:
    """Take buffers for the parameters of all launches, and write the addresses."""
    buffers = _Buffers(launches)
    bound |= {
        "launcher": nvrtc._launcher(),
        "again": _again(launches),
        "pools": buffers.pools,
        "new": buffers.new,
    }
    entries = []
    for i, launch in enumerate(launches):
        entries += [f"c{i}", f"p{i}"] if launch.parameters is not None else [f"c{i}", f"p{i}", f"w{i}"]
    lines += [
        "try: call = pools[stream].pop()",
        "except (KeyError, IndexError): call = new(stream)",
        f"m, pool, {', '.join(entries)}, _ = call",
    ]
    index = 0
    for i, launch in enumerate(launches):
        if launch.parameters is None:
            pointers = "".join(f"{text(address)}, " for _, address, _ in launch.fields)
            lines += [f"w = ({pointers})", f"if w{i}.pointers != w: w{i}.write(w)"]
            continue
        for position, value in enumerate(launch.parameters):
            if isinstance(value, Address):
                lines.append(f"m[{index + position}] = {text(value)}")
        index += len(launch.parameters)


def _again(launches: Sequence[Launch]) -> Callable[[int, int, int, int], None]:
    kernels = [launch.kernel for launch in launches]

    def again(index: int, status: int, config: int, parameters: int) -> None:
        nvrtc._launch_again(kernels[index], status, config, parameters)

    return again


class _Maps(dict[int, Any]):
    """Tensor maps of one argument by address, made at the first use of each."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, pointer: int) -> Any:
        if len(self) >= MAX_MAPS:
            self.clear()
        made = self[pointer] = self._make(pointer)
        return made


def _triton_lines(
    i: int, launch: TritonLaunch, text: Callable[[Address], str], bound: dict[str, Any]
) -> list[str]:
    """Return the lines of one launch by Triton."""
    bound[f"launch{i}"] = launch.launch
    arguments = [*map(str, launch.sizes), "stream"]
    for j, value in enumerate((*launch.head, *launch.arguments)):
        if isinstance(value, Address):
            arguments.append(text(value))
        elif isinstance(value, Descriptor):
            bound[f"maps{i}_{j}"] = _Maps(value.make)
            arguments.append(f"maps{i}_{j}[{text(value.address)}]")
        elif value is None or type(value) in (int, bool):
            arguments.append(repr(value))
        else:
            bound[f"k{i}_{j}"] = value
            arguments.append(f"k{i}_{j}")
    return [f"launch{i}({', '.join(arguments)})"]
