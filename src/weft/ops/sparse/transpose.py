"""Gradients of sparse products. The dense factor's is the product with the transposed matrix.

The transposed matrix needs its nonzeros in the order of the columns. A stable sort by column brings them
into one order, so that the sums have the same bits every time, where atomic additions would not. Its cost is
a sort of the nonzeros in each backward: several passes over keys and positions, which take longer than the
product itself. pattern.py sorts once for many products with one pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops._common.offsets import piece_numbers

Product = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
PIECE = 1 << 24  # products of a gradient of values that are in memory at once


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of the sums: float64 stays, all others become float32."""
    return x if x.dtype == torch.float64 else x.float()


def valid(columns: Tensor, size: int) -> Tensor:
    """Return True for the columns that a matrix of ``size`` columns has."""
    return (columns >= 0) & (columns < size)


@dataclass(frozen=True, eq=False)
class Transposition:
    """Pattern of a transposed matrix, and where its nonzeros stand in the given one.

    ``rows`` (nonzeros,) int32 is the row of each nonzero of the given matrix. ``order`` (nonzeros,) int64 is
    the nonzero of the given matrix at each place of the transposed one. ``columns`` and ``offsets`` are those
    of the transposed matrix in CSR. The nonzeros of a row stand in the order of the given matrix. A column of
    it that is out of range is dropped: no offset reaches its place.
    """

    rows: Tensor
    order: Tensor
    columns: Tensor
    offsets: Tensor


def transpose(columns: Tensor, offsets: Tensor, size: int) -> Transposition:
    """Return the transposition of a matrix of ``size`` columns, by torch's operations."""
    # Columns out of range count as one more row, at the end, which no offset reaches.
    keys = torch.where(valid(columns, size), columns, size)
    keys, order = keys.sort(stable=True)
    starts = torch.searchsorted(keys, torch.arange(size + 1, device=keys.device, dtype=keys.dtype))
    rows = piece_numbers(offsets, columns.shape[0]).int()
    return Transposition(rows, order, rows[order], starts)


def gradient_of_values(grad: Tensor, rows: Tensor, columns: Tensor, dense: Tensor) -> Tensor:
    """Return for each nonzero (row, column) the product of the gradient's row and the dense factor's."""
    size = dense.shape[0]
    if columns.shape[0] == 0 or size == 0:
        return grad.new_zeros(columns.shape)
    wide_grad, wide_dense = widened(grad), widened(dense)
    pieces = []
    for at, row in zip(*(x.split(max(1, PIECE // max(1, dense[0].numel()))) for x in (columns, rows)),
                       strict=True):  # fmt: skip
        terms = wide_grad[row] * wide_dense[at.clamp(0, size - 1).long()]
        piece = terms if terms.dim() == 1 else terms.sum(1)
        pieces.append(torch.where(valid(at, size), piece, torch.nan))
    return torch.cat(pieces).to(grad.dtype)


def backward_by(product: Product) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the backward of an implementation whose forward is ``product``."""

    def backward(
        grad: Tensor, values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor
    ) -> tuple[Tensor, Tensor]:
        t = transpose(columns, offsets, dense.shape[0])
        transposed = product(values[t.order], t.columns, t.offsets, grad)
        return gradient_of_values(grad, t.rows, columns, dense), transposed

    return backward
