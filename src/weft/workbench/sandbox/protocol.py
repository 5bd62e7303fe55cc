"""Messages between a sandbox and its worker process: a JSON header, then the raw bytes of tensors.

Large tensors of a GPU need not travel: a sender may describe where they lie (:mod:`device_memory`), and the
receiver copies them at the end of the message.

Nothing is pickled, so a message of a worker cannot execute code here; every length is checked
before memory is allocated for it. :func:`read_message` is a generator of the buffers to fill, in
order, so that one description of the format serves the blocking and the non-blocking reader.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from weft.workbench.sandbox import device_memory
from weft.workbench.sandbox.device_memory import ExportedMemory

PREFIX = struct.Struct("<8sQ")  # magic bytes, and the length of the header
MAGIC = b"weftcell"
MAX_HEADER_BYTES = 64 << 20
# Requests about the reply before: its exported tensors are copied, or could not be and are to be sent.
RELEASE, RESEND = "release", "resend"
FAILED = "weft-worker: "  # begins the line that a worker prints when it fails outside of a request
DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MIN_PINNED_BYTES = 1 << 20  # of a tensor that passes between a GPU and the host in pinned memory
STAGING_BYTES = 1 << 26  # of a GPU's tensor that are on the host at once
MAX_PIECES = 64  # send or receive calls in a row, so that the caller regularly checks its deadline

Message = tuple[dict[str, Any], list[torch.Tensor]]
MessageReader = Generator[memoryview, None, Message]


class ProtocolError(Exception):
    """Raised if the received bytes are not a message."""


def byte_view(dense: torch.Tensor) -> memoryview:
    """Return the bytes of a dense CPU tensor, to be read or written in place."""
    return _bytes_of(dense).numpy().data


def pack(
    header: dict[str, Any], tensors: Sequence[torch.Tensor], exported: list[torch.Tensor] | None = None
) -> Iterable[memoryview]:
    """Return a message as pieces to send in order.

    Tensors may have any layout and device; they arrive dense. Those of a GPU are copied to the host
    while they are sent, so that the host never holds a whole one. With ``exported``, the receiver copies the
    large ones by itself: they are appended to it, and must stay alive until the receiver has answered.
    """
    dense = [t.detach().resolve_conj().resolve_neg().contiguous() for t in tensors]
    memories = [None if exported is None else device_memory.export(t) for t in dense]
    described = [_describe(t, m) for t, m in zip(dense, memories, strict=True)]
    sent = [t for t, m in zip(dense, memories, strict=True) if m is None]
    if exported is not None:
        exported += [t for t, m in zip(dense, memories, strict=True) if m is not None]
    text = json.dumps({**header, "exported": bool(exported), "tensors": described}).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes, more than {MAX_HEADER_BYTES}")
    start = PREFIX.pack(MAGIC, len(text)) + text
    del dense  # each is freed as soon as it is sent
    return _pieces(start, sent)


def _describe(tensor: torch.Tensor, exported: ExportedMemory | None) -> list[Any]:
    described: list[Any] = [DTYPE_NAMES[tensor.dtype], list(tensor.shape)]
    return described if exported is None else [*described, exported.handle.hex(), exported.offset]


def _pieces(start: bytes, dense: list[torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(start)
    staging: torch.Tensor | None = None
    while dense:
        tensor = dense.pop(0)  # freed as soon as it is sent
        if not tensor.numel():
            continue  # a reader takes a buffer that is filled with nothing for the channel's end
        if tensor.device.type == "cpu":
            yield byte_view(tensor)
            continue
        for piece in _bytes_of(tensor).split(STAGING_BYTES):
            staging = _staging_buffer() if staging is None else staging
            # The receiver of the view before has read it when the next one is requested.
            staging[: piece.numel()].copy_(piece)
            yield byte_view(staging[: piece.numel()])


def _bytes_of(dense: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor, on its device, to be read or written in place."""
    flat = dense.as_strided((dense.numel(),), (1,))  # one element may have any stride, even 0
    return flat.view(torch.uint8)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in host memory, a GPU's large tensor in pinned memory: it is several times
    as fast, and PyTorch keeps it for the next one."""
    if not tensor.is_cuda or tensor.nbytes < MIN_PINNED_BYTES:
        return tensor.cpu()
    return _on_host(tensor.shape, tensor.dtype).copy_(tensor)


def _on_host(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate host memory, pinned where this process uses a GPU and the tensor is large."""
    large = math.prod(shape) * dtype.itemsize >= MIN_PINNED_BYTES
    if large and torch.cuda.is_initialized():
        with suppress(RuntimeError):  # no more memory can be pinned
            return torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.empty(shape, dtype=dtype)


def _staging_buffer() -> torch.Tensor:
    """Return a buffer on the host through which tensors of a GPU pass, pinned where that is possible."""
    return _on_host((STAGING_BYTES,), torch.uint8)


def read_message(limit: int | None = None, device: str = "cpu") -> MessageReader:
    """Yield each buffer to fill; return header and tensors. ``limit``: bytes of all tensors.

    The tensors are on ``device``. Raises ProtocolError if the bytes are not a message, and
    :class:`~weft.workbench.sandbox.device_memory.NotShared`, at the message's end, if a tensor that stayed in
    the sender's memory cannot be copied, and ``torch.OutOfMemoryError`` if the tensors do not fit on a GPU.
    """
    # Fixed size first, then lengths that were checked: a sender cannot make the reader allocate at will.
    prefix = bytearray(PREFIX.size)
    yield memoryview(prefix)
    magic, length = PREFIX.unpack(prefix)
    if magic != MAGIC or not 0 < length <= MAX_HEADER_BYTES:
        raise ProtocolError("it does not begin as a message does")
    text = bytearray(length)
    yield memoryview(text)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("its header is no JSON") from error
    if not isinstance(header, dict):
        raise ProtocolError("its header is no object")
    described = header.pop("tensors", None)
    tensors = _allocate(described, limit, device)
    exported = [_exported(entry, device) for entry in described]
    for tensor, memory in zip(tensors, exported, strict=True):
        if not tensor.numel() or memory is not None:
            continue
        if tensor.device.type == "cpu":
            yield byte_view(tensor)
            continue
        staging = _staging_buffer()
        for piece in _bytes_of(tensor).split(STAGING_BYTES):
            yield byte_view(staging[: piece.numel()])
            piece.copy_(staging[: piece.numel()])
    for tensor, memory in zip(tensors, exported, strict=True):
        if memory is not None:
            device_memory.copy_into(tensor, memory)
    return header, tensors


def _allocate(described: Any, limit: int | None, device: str) -> list[torch.Tensor]:
    """Allocate the described tensors. The sender is not trusted: validate everything first."""
    if not isinstance(described, list):
        raise ProtocolError("its header lists no tensors")
    total, tensors = 0, []
    for entry in described:
        name, shape = entry[:2] if isinstance(entry, list) and len(entry) in (2, 4) else (None, None)
        if not isinstance(name, str) or name not in DTYPES or not isinstance(shape, list):
            raise ProtocolError("its header describes no tensor")
        # type(n) is int: True is an instance of int, too
        if not all(type(n) is int and 0 <= n < 1 << 48 for n in shape) or len(shape) > 64:
            raise ProtocolError("its header describes an impossible shape")
        # Python integers: the product of announced sizes cannot overflow before it is compared.
        total += math.prod(shape) * DTYPES[name].itemsize
        if limit is not None and total > limit:
            raise ProtocolError(f"it announces more than {limit} bytes")
        try:
            dtype = DTYPES[name]
            on_host = device == "cpu"
            tensors.append(
                _on_host(shape, dtype) if on_host else torch.empty(shape, dtype=dtype, device=device)
            )
        except torch.OutOfMemoryError:
            raise  # of a GPU that others use too: the sizes may be honest
        except RuntimeError as error:  # more memory than there is, or strides that overflow
            raise ProtocolError("its tensors do not fit in memory") from error
    return tensors


def _exported(entry: list[Any], device: str) -> ExportedMemory | None:
    """Return where a described tensor lies in the sender's memory; None if its bytes follow."""
    if len(entry) == 2:
        return None
    _, _, handle, offset = entry
    if device == "cpu" or not isinstance(handle, str) or type(offset) is not int:
        raise ProtocolError("its header describes no memory of a GPU")
    try:
        handle_bytes = bytes.fromhex(handle)
    except ValueError:
        handle_bytes = b""
    if len(handle_bytes) != device_memory.HANDLE_BYTES:
        raise ProtocolError("its header has no handle of an allocation")
    return ExportedMemory(handle_bytes, offset)


def send(channel: socket.socket, pieces: Iterable[memoryview]) -> None:
    """Send a packed message over a blocking channel."""
    for piece in pieces:
        channel.sendall(piece)


def receive(channel: socket.socket) -> Message | None:
    """Return the next message of a blocking channel, or None at its end."""
    reader = read_message()
    unfilled = next(reader)
    while True:
        count = channel.recv_into(unfilled)
        if not count:
            return None
        unfilled = unfilled[count:]
        if not unfilled:
            try:
                unfilled = next(reader)
            except StopIteration as stop:
                message: Message = stop.value
                return message


def receive_available(channel: socket.socket, reader: MessageReader, unfilled: memoryview) -> memoryview:
    """Receive from a non-blocking channel; return the rest of the buffer that is still unfilled.

    Raises StopIteration with the complete message, and EOFError at the channel's end.
    """
    for _ in range(MAX_PIECES):
        try:
            count = channel.recv_into(unfilled)
        except BlockingIOError:
            break
        if not count:
            raise EOFError
        # A filled buffer asks the reader for the next one; StopIteration ends the message.
        unfilled = unfilled[count:] or next(reader)
    return unfilled


def send_available(channel: socket.socket, outgoing: deque[memoryview]) -> None:
    """Send as much as a non-blocking channel accepts; remove it from ``outgoing``."""
    with suppress(BlockingIOError):
        for _ in range(MAX_PIECES):
            if not outgoing:
                return
            outgoing[0] = outgoing[0][channel.send(outgoing[0]) :]
            if not outgoing[0]:
                outgoing.popleft()


class OutputTail:
    """The first and the last bytes of a stream of any length, in bounded memory."""

    def __init__(self, limit: int) -> None:
        self.half = max(limit // 2, 1)
        self.first, self.last, self.dropped = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        free = self.half - len(self.first)
        self.first += data[:free]
        self.last += data[max(free, 0) :]
        if len(self.last) > 2 * self.half:  # trim rarely: each trim moves the bytes
            self._trim()

    def _trim(self) -> None:
        self.dropped += max(len(self.last) - self.half, 0)
        del self.last[: -self.half]

    def text(self) -> str:
        self._trim()
        gap = f"\n... {self.dropped} bytes left out ...\n" if self.dropped else ""
        first, last = (bytes(part) for part in (self.first, self.last))
        if not gap:
            return (first + last).decode(errors="replace")
        return first.decode(errors="replace") + gap + last.decode(errors="replace")
