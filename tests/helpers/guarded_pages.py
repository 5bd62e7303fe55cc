"""Tensors that begin or end at a page of memory that may not be read: a load past them ends the process."""

from __future__ import annotations

import ctypes
import mmap

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_MAPPINGS: list[mmap.mmap] = []  # never unmapped: the tensors have no reference to them


def place(x: torch.Tensor, at_end: bool) -> torch.Tensor:
    """Return a contiguous copy of ``x``, on the CPU, between two pages that may not be read.

    It begins right after the first of them, or, if ``at_end``, ends right before the second.
    """
    size = x.numel() * x.element_size()
    pages = -(-size // mmap.PAGESIZE)
    mapping = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    _MAPPINGS.append(mapping)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    offset = mmap.PAGESIZE + (pages * mmap.PAGESIZE - size if at_end else 0)
    result = torch.frombuffer(mapping, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape)
    result.copy_(x)
    for page in (start, start + (pages + 1) * mmap.PAGESIZE):
        assert _LIBC.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) == 0
    return result
