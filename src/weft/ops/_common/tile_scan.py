"""Sizes of scans in which blocks take tiles of rows and pass sums to each other; see tile_scan.cuh."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.machine.device_limits import smem_per_block

# Turns of a block: of a tile's loads, and from its sum to its outputs.
AHEAD, DELAY = 1, 4
UNALIGNED_ELEMENTS = 8  # in each thread where accesses are of one element


def vec_width(x2d: torch.Tensor, y: torch.Tensor) -> int:
    """Return the number of elements of an access: 16 bytes of them, or one.

    Vectors need rows of x and of y that lie alike to multiples of 16 bytes: the kernels begin a row at one.
    """
    rows, columns = x2d.shape
    size = x2d.element_size()
    apart = (x2d.data_ptr() - y.data_ptr()) % 16
    between_rows = (x2d.stride(0) - columns) * size % 16 if rows > 1 else 0
    return 1 if apart or between_rows else 16 // size


def count_words(columns: int, tile: int) -> tuple[int, int]:
    """Return a row's number of tiles, and of the words of its tiles, groups and super-groups."""
    tiles = -(-columns // tile)
    groups = -(-tiles // 32)
    return tiles, tiles + groups + -(-groups // 32)


def scan_memory(threads: int, thread_bytes: int, delay: int) -> int:
    """Return the bytes of dynamic shared memory of a block: tiles, and a sum before each of their threads."""
    return threads * ((AHEAD + 1 + delay) * thread_bytes + (delay + 1) * 4)


def delay_that_fits(memory: Callable[[int], int], device: torch.device) -> int:
    """Return DELAY, or fewer turns where a block has no ``memory(turns)`` bytes (99 KiB at sm_89)."""
    limit = smem_per_block(device)
    return next((d for d in range(DELAY, 1, -1) if memory(d) <= limit), 1)
