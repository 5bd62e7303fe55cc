"""Products with a weight in blocks, with faults: columns, transposed blocks, empty rows, NaN that spreads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.core import registry
from weft.ops.block_sparse.blocks import to_dense
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, plant

NAME = "block_sparse_linear"


def _right(*inputs: Tensor) -> Any:
    return registry.implementation(NAME, "eager").forward(*inputs)


def _column_beside(
    x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor, bias: Tensor
) -> Tensor:
    """Take the column of the block before: an index that is loaded one step late."""
    return _right(x, values, crow, col.roll(1), transposed, bias)  # type: ignore[no-any-return]


def _transposed_blocks(
    x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor, bias: Tensor
) -> Tensor:
    """Read each block transposed."""
    return _right(x, values.transpose(1, 2), crow, col, transposed, bias)  # type: ignore[no-any-return]


def _last_block_lost(
    x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor, bias: Tensor
) -> Tensor:
    """Leave out the last block of each row of blocks."""
    shortened = values.clone()
    lasts = crow[1:][crow[1:] > crow[:-1]].long() - 1
    shortened[lasts] = 0
    return _right(x, shortened, crow, col, transposed, bias)  # type: ignore[no-any-return]


def _empty_rows_keep_zero(
    x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor, bias: Tensor
) -> Tensor:
    """Write 0, not the bias, where a row has no block: a kernel that skips empty rows."""
    y = _right(x, values, crow, col, transposed, bias)
    empty = (crow[1:] == crow[:-1]).repeat_interleave(values.shape[1])
    return y.masked_fill(empty, 0)  # type: ignore[no-any-return]


def _dense_product(
    x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor, bias: Tensor
) -> Tensor:
    """Multiply with the dense weight: an infinity of x meets the zeros between the blocks."""
    w = to_dense(values.float(), crow, col, x.shape[-1])
    return (x.float() @ w.t() + bias.float()).to(x.dtype)


def _plant(row: str, what: str, title: str, forward: Forward) -> Mutant:
    return plant(f"{row}/{NAME}/eager/{what}", title, "error drift property special", lambda: forward)


MUTANTS = (
    _plant("W04", "column-beside", "takes the column of the block before", _column_beside),
    _plant("W04", "transposed-blocks", "reads each block transposed", _transposed_blocks),
    _plant("W04", "last-block", "leaves out the last block of each row", _last_block_lost),
    _plant("W02", "empty-rows", "writes 0 where a row has no block", _empty_rows_keep_zero),
    _plant("W12", "dense", "spreads an infinity of x to rows without a block there", _dense_product),
)
