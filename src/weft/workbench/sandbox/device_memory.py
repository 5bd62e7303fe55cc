"""Copies of a GPU's memory between two processes, without a way through the host (CUDA IPC).

An answer of gigabytes takes seconds through a worker's channel, and milliseconds from memory to memory
(docs/log.md, 2026-11-23). The worker exports the allocation behind a tensor as a handle, and this process
copies the bytes into memory of its own before it looks at any of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from weft.machine import driver

LEAST_BYTES = 1 << 24  # of a tensor: opening an allocation costs as much as sending some megabytes
HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # cuda.h: CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class NotShared(Exception):
    """Raised if an exported allocation cannot be opened here, or is not what was announced."""


@dataclass(frozen=True)
class ExportedMemory:
    """Handle of an allocation in another process, and where a tensor's first byte lies in it."""

    handle: bytes
    offset: int


class _Handle(ctypes.Structure):
    """CUipcMemHandle: the driver takes it by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@cache
def _library() -> ctypes.CDLL | None:
    return driver.library()


def export(tensor: torch.Tensor) -> ExportedMemory | None:
    """Export the memory of a dense tensor on a GPU; None if it is small or its allocator cannot do so.

    The tensor must stay alive until the other process has copied it. All work on the current stream is
    complete when this returns, as it would be after a copy to the host.
    """
    library = _library()
    if library is None or not tensor.is_cuda or tensor.nbytes < LEAST_BYTES:
        return None
    handle, (base, _) = _Handle(), _allocation(tensor.data_ptr(), tensor.device)
    with torch.cuda.device(tensor.device):
        # Memory of a virtual address range or of a stream-ordered pool has no such handle.
        if not base or library.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(base)):
            return None
        torch.cuda.current_stream().synchronize()
    return ExportedMemory(bytes(handle.reserved), tensor.data_ptr() - base)


def copy_into(target: torch.Tensor, exported: ExportedMemory) -> None:
    """Copy the exported bytes into a dense tensor on a GPU; raise :class:`NotShared` if that fails.

    The sender is not trusted: a range beyond its allocation is refused before anything is read.
    """
    library = _library()
    if library is None:
        raise NotShared("no driver")
    with torch.cuda.device(target.device), _opened(library, exported.handle) as address:
        base, size = _allocation(address, target.device)
        first = address - base + exported.offset
        if exported.offset < 0 or first + target.nbytes > size:
            raise NotShared("the range does not lie in the allocation")
        stream = torch.cuda.current_stream()
        status = library.cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(target.data_ptr()),
            ctypes.c_uint64(address + exported.offset),
            ctypes.c_size_t(target.nbytes),
            ctypes.c_void_p(stream.cuda_stream),
        )
        stream.synchronize()
    if status:
        raise NotShared(f"the copy failed (error {status})")


@contextmanager
def _opened(library: ctypes.CDLL, handle: bytes) -> Iterator[int]:
    """Map another process's allocation here for as long as the block runs."""
    opened = _Handle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
    address = ctypes.c_uint64()
    if status := library.cuIpcOpenMemHandle_v2(ctypes.byref(address), opened, _LAZY_PEER_ACCESS):
        raise NotShared(f"the allocation cannot be opened (error {status})")
    try:
        yield address.value
    finally:
        library.cuIpcCloseMemHandle(address)


def _allocation(address: int, device: torch.device) -> tuple[int, int]:
    """Return the first address and the bytes of the allocation that holds an address; 0, 0 for none."""
    library = _library()
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    with torch.cuda.device(device):
        assert library is not None
        if library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)):
            return 0, 0
    return base.value, size.value
