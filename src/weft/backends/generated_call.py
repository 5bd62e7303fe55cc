"""Functions that repeat a recorded call (recorded_call.py) with other tensors.

A function allocates, writes addresses into the parameters of the kernels, and launches. It is generated as
text, because the host's caches are cold between two steps of a training loop: each further function, object
or dictionary of a call then costs 0.5 to 1 us (docs/use/dispatch.md).
"""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weft.backends import nvrtc
from weft.backends.recorded_call import (
    ALIGNMENT,
    Address,
    Descriptor,
    Launch,
    NotRecordableError,
    Recording,
    TritonLaunch,
    addresses_of,
    extent,
    launch_hooks,
)

SCRATCH_ALIGNMENT = 512  # bytes, as PyTorch's allocator has it
WORD, MAP_WORDS = 8, 16  # bytes of a word; words of a tensor map
MAX_MAPS = 64  # by address, of one argument
MAX_STREAMS = 64  # sets of launch configurations of a function, one for each stream


class _Structure:
    """A structure of a launch; ``pointers`` are the addresses that it has now."""

    def __init__(self, launch: Launch) -> None:
        # Tensor maps begin at multiples of 64 bytes.
        self._memory = ctypes.create_string_buffer(len(launch.structure) + 64)
        start = -ctypes.addressof(self._memory) % 64
        self._pointer = (ctypes.c_void_p * 1)(ctypes.addressof(self._memory) + start)
        self.address = ctypes.addressof(self._pointer)
        size = -(-len(launch.structure) // WORD) * WORD
        self._words = memoryview(self._memory).cast("B")[start : start + size].cast("Q")
        self._words.cast("B")[: len(launch.structure)] = launch.structure
        self._fields = [
            (offset // WORD, None if make is None else _Maps(partial(_words_of_map, make)))
            for offset, _, make in launch.fields
        ]
        self.pointers: tuple[int, ...] = (0,) * len(self._fields)

    def write(self, pointers: tuple[int, ...]) -> None:
        """Replace the addresses that have changed."""
        words = self._words
        for (index, maps), pointer, before in zip(self._fields, pointers, self.pointers, strict=True):
            if pointer == before:
                continue
            if maps is None:
                words[index] = pointer
            else:
                words[index : index + MAP_WORDS] = maps[pointer]
        self.pointers = pointers


def _words_of_map(make: Callable[[int], ctypes.Structure], pointer: int) -> memoryview:
    return memoryview(bytes(make(pointer))).cast("Q")


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
    """Lines around the launches of a generated function.

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
    used = sorted({a.index for one in recording.launches for a in addresses_of(one) if a.is_input})
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
        is_input, index = recording.locate(result)
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
            scratch += math.ceil(extent(buffer) / SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
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
        tensor_map = self[pointer] = self._make(pointer)
        return tensor_map


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
