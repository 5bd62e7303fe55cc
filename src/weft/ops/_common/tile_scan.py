"""Sizes of scans in which blocks take tiles of rows and pass sums to each other; see tile_scan.cuh."""

from __future__ import annotations

import torch

# Turns of a block: of a tile's loads, and from its sum to its outputs.
AHEAD, DELAY = 1, 3
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
