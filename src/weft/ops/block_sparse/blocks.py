"""Matrices stored in blocks (BSR), in torch calls: pruning by blocks, the dense matrix, the transposed index.

A matrix W (N, K) with square blocks of side b is three tensors: ``values`` (blocks, b, b), the stored blocks
row of blocks after row of blocks; ``col`` (blocks,) int32, the column of each in units of blocks; ``crow``
(N / b + 1,) int32, where each row of blocks begins, with their number at the end. These are the three tensors
of ``torch.sparse_bsr_tensor``.

The *transposed index* of a pattern is one int32 tensor (K / b + 1 + 2 blocks,) in three parts: where each
column of blocks begins, the row of each stored block in the order of the columns, and the place of that block
in ``values``. Blocks of one column stay in the order of their rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core import WeftError
from weft.ops._common import validate
from weft.ops._common.offsets import piece_numbers

SIDES = (16, 32, 64, 128)
FLOATS = ("float32", "float64", "float16", "bfloat16")


def check_sizes(name: str, block: Any, **sizes: int) -> None:
    """Raise :class:`WeftError` unless ``block`` is a side that the kernels take and divides each size."""
    if isinstance(block, float) or block not in SIDES:
        raise WeftError(f"{name}: block", expected=" or ".join(map(str, SIDES)), got=f"{block!r:.80}")
    for argument, size in sizes.items():
        check_count(f"{name}: {argument}", size)
        if size % block:
            hint = f"pad with zeros to {-(-size // block) * block}"
            raise WeftError(f"{name}: {argument}", expected=f"a multiple of {block}", got=size, hint=hint)


def check_count(where: str, count: Any) -> None:
    """Raise :class:`WeftError` unless ``count`` is an integer of at least 0."""
    if not isinstance(count, int | torch.SymInt) or isinstance(count, bool) or count < 0:
        raise WeftError(where, expected="an int of at least 0", got=f"{count!r:.80}")


def check_pattern(name: str, crow: Any, col: Any) -> None:
    """Raise :class:`WeftError` unless both indices are int32 vectors on one device; they are not read."""
    validate.tensor(name, "crow", crow, ("int32",), dims=range(1, 2))
    validate.tensor(name, "col", col, ("int32",), dims=range(1, 2))
    validate.same_device(name, "crow and col", crow, col)


def to_blocks(w: Tensor, block: int, density: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``values``, ``crow`` and ``col`` of the blocks of a matrix that have the largest norm.

    Args:
        w: (N, K), both multiples of ``block``; a floating-point dtype; any strides; CPU or CUDA.
        block: side of a block: 16, 32, 64 or 128.
        density: share of the blocks that stay, 0 to 1. The number is rounded; a density above 0 keeps at
            least one block.

    The norm of a block is the root of its sum of squares, added up in float32 (float64 of that dtype). Of
    equal norms the earlier block stays; NaN counts as the largest. The values are copies, without a gradient.

    Raises:
        WeftError: w is no such matrix, or block or density is out of range.
    """
    if not isinstance(w, Tensor) or w.dim() != 2 or not w.is_floating_point():
        got = f"{w.dtype}, {tuple(w.shape)}" if isinstance(w, Tensor) else type(w).__name__
        raise WeftError("to_blocks: w", expected="a floating-point matrix", got=got)
    check_sizes("to_blocks", block, rows=w.shape[0], columns=w.shape[1])
    if not isinstance(density, int | float) or not 0 <= density <= 1:
        raise WeftError("to_blocks: density", expected="a share from 0 to 1", got=f"{density!r:.80}")
    rows, columns = (size // block for size in w.shape)
    tiles = w.detach().reshape(rows, block, columns, block).transpose(1, 2).reshape(-1, block, block)
    wide = tiles if w.dtype == torch.float64 else tiles.float()
    norms = wide.square().sum((1, 2)).sqrt()
    count = min(rows * columns, max(round(density * rows * columns), int(density > 0)))
    # A stable sort keeps the order of equal norms, and torch sorts NaN above infinity.
    order = torch.sort(norms, descending=True, stable=True).indices[:count]
    return from_places(tiles, order.sort().values, rows, columns)


def from_places(tiles: Tensor, places: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, crow and col of the blocks at rising ``places`` among all ``tiles``, row after row."""
    row = places // max(1, columns)
    crow = torch.searchsorted(row, torch.arange(rows + 1, device=places.device)).int()
    return tiles[places].contiguous(), crow, (places % max(1, columns)).int()


def to_dense(values: Tensor, crow: Tensor, col: Tensor, columns: int) -> Tensor:
    """Return the matrix (N, ``columns``): the blocks at their places, added up where two share one; else 0.

    Differentiable in ``values``. Indices must be in range. Raises :class:`WeftError` if the shapes or dtypes
    do not fit.
    """
    validate.tensor("to_dense", "values", values, FLOATS, dims=range(3, 4))
    check_pattern("to_dense", crow, col)
    blocks, block = values.shape[:2]
    check_sizes("to_dense", block, columns=columns)
    rows, across = crow.shape[0] - 1, columns // block
    tile = piece_numbers(crow, blocks) * across + col.long()
    tiles = values.new_zeros((rows * across, block, block)).index_add(0, tile, values)
    return tiles.view(rows, across, block, block).transpose(1, 2).reshape(rows * block, columns)


def transposed_index(crow: Tensor, col: Tensor, column_blocks: int) -> Tensor:
    """Return the transposed index of a pattern, (column_blocks + 1 + 2 blocks,) int32.

    A sort of as many numbers as there are blocks: compute it once for a pattern that stays. Blocks whose
    column is out of range are in no column; the host waits for nothing. Raises :class:`WeftError` if the
    arguments do not fit.
    """
    check_pattern("transposed_index", crow, col)
    check_count("transposed_index: column_blocks", column_blocks)
    blocks = col.shape[0]
    # Blocks out of range count as one more column, at the end, which no start reaches.
    keys = torch.where(is_inside(col, column_blocks), col, column_blocks)
    keys, order = keys.sort(stable=True)
    ends = torch.arange(column_blocks + 1, device=col.device, dtype=keys.dtype)
    starts = torch.searchsorted(keys, ends)
    rows = piece_numbers(crow, blocks)[order]
    return torch.cat((starts.int(), rows.int(), order.int()))


def split_index(transposed: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three parts of a transposed index: starts, rows, places."""
    column_blocks = transposed.shape[0] - 2 * blocks - 1
    starts, rows, places = transposed.split((column_blocks + 1, blocks, blocks))
    return starts, rows, places


def is_inside(col: Tensor, column_blocks: int) -> Tensor:
    """Return True for the columns that a matrix of ``column_blocks`` columns of blocks has."""
    return (col >= 0) & (col < column_blocks)
