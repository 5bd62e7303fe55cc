"""Sizes of scans in which blocks take tiles of rows and pass sums to each other; see tile_scan.cuh."""

from __future__ import annotations

import torch

from weft.machine.device_limits import smem_per_block, smem_per_sm

BLOCKS_AN_SM = 2  # that take tiles, as far as they have room
AHEAD = 1  # turns of a block for a tile's loads
# Turns from a tile's sum to its outputs: as many as there is shared memory for.
MOST_DELAY, LEAST_DELAY = 5, 3
UNALIGNED_ELEMENTS = 8  # in each thread where accesses are of one element, with a sum in a register for each
STATIC_BYTES = 1024 + 512  # of a block: what the system keeps, and what the kernels declare


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


def slots(delay: int) -> int:
    """Return the number of a block's tiles in shared memory, which wait ``delay`` turns."""
    return AHEAD + 1 + delay


def best_delay(device: torch.device, slot_bytes: int, most: int = MOST_DELAY) -> int:
    """Return the turns, ``most`` at the most, for which tiles of ``slot_bytes`` have room on ``device``."""
    share = (smem_per_sm(device) or float("inf")) / BLOCKS_AN_SM
    free_bytes = min(smem_per_block(device), share) - STATIC_BYTES
    return next((d for d in range(most, LEAST_DELAY, -1) if slots(d) * slot_bytes <= free_bytes), LEAST_DELAY)
