"""Messages between a cell's two ends: a JSON header, then the raw bytes of its tensors.

Nothing is pickled, so what a guest sends can at worst be wrong; every length is checked before
memory is set aside for it. A reader is a generator of the buffers to be filled, in their order, so
that one description of the format serves the end that waits and the end that watches the clock.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Generator, Sequence
from typing import Any

import torch

HEAD = struct.Struct("<8sQ")  # a mark, and the length of the header
MARK = b"weftcell"
HEADER_BYTES = 64 << 20
DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Message = tuple[dict[str, Any], list[torch.Tensor]]
Reading = Generator[memoryview, None, Message]


class Broken(Exception):
    """What came is no message."""


def view(dense: torch.Tensor) -> memoryview:
    """The bytes of a dense CPU tensor, to be read or written in place."""
    flat = dense.as_strided((dense.numel(),), (1,))  # one element may have any stride, even 0
    return flat.view(torch.uint8).numpy().data


def pack(header: dict[str, Any], tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """A message as pieces to send in turn; tensors of any layout and device, dense on arrival."""
    dense = [t.detach().cpu().resolve_conj().resolve_neg().contiguous() for t in tensors]
    described = [[NAMES[t.dtype], list(t.shape)] for t in dense]
    text = json.dumps({**header, "tensors": described}).encode()
    if len(text) > HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes, more than {HEADER_BYTES}")
    start = HEAD.pack(MARK, len(text)) + text
    return [memoryview(start), *(view(t) for t in dense if t.numel())]


def reading(limit: int | None = None) -> Reading:
    """Yields each buffer to fill; returns header and tensors. ``limit``: bytes of all tensors.

    Raises Broken where the bytes are no message.
    """
    head = bytearray(HEAD.size)
    yield memoryview(head)
    mark, length = HEAD.unpack(head)
    if mark != MARK or not 0 < length <= HEADER_BYTES:
        raise Broken("it does not begin as a message does")
    text = bytearray(length)
    yield memoryview(text)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Broken("its header is no JSON") from error
    if not isinstance(header, dict):
        raise Broken("its header is no object")
    tensors = _allocate(header.pop("tensors", None), limit)
    for tensor in tensors:
        if tensor.numel():
            yield view(tensor)
    return header, tensors


def _allocate(described: Any, limit: int | None) -> list[torch.Tensor]:
    if not isinstance(described, list):
        raise Broken("its header lists no tensors")
    total, tensors = 0, []
    for one in described:
        name, shape = one if isinstance(one, list) and len(one) == 2 else (None, None)
        if not isinstance(name, str) or name not in DTYPES or not isinstance(shape, list):
            raise Broken("its header describes no tensor")
        if not all(type(n) is int and 0 <= n < 1 << 48 for n in shape) or len(shape) > 64:
            raise Broken("its header describes an impossible shape")
        total += math.prod(shape) * DTYPES[name].itemsize
        if limit is not None and total > limit:
            raise Broken(f"it announces more than {limit} bytes")
        try:
            tensors.append(torch.empty(shape, dtype=DTYPES[name]))
        except RuntimeError as error:  # more than there is, or strides that overflow
            raise Broken("there is no room for its tensors") from error
    return tensors


def send(channel: socket.socket, parts: Sequence[memoryview]) -> None:
    for part in parts:
        channel.sendall(part)


def receive(channel: socket.socket) -> Message | None:
    """The next message of a channel that blocks, or None at its end."""
    message = reading()
    want = next(message)
    while True:
        got = channel.recv_into(want)
        if not got:
            return None
        want = want[got:]
        if not want:
            try:
                want = next(message)
            except StopIteration as whole:
                result: Message = whole.value
                return result
