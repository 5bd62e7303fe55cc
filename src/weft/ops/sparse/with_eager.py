"""Sparse products composed of torch calls: all products in memory, then sums of segments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core import Implementation
from weft.ops.sparse.transpose import valid, widened


def forward(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    rows, size = offsets.shape[0] - 1, dense.shape[0]
    table = widened(dense) if dense.dim() == 2 else widened(dense)[:, None]
    if rows == 0 or values.shape[0] == 0 or table.numel() == 0:
        # Sums of nothing, which still have a gradient of zeros.
        nothing = widened(values).sum() * 0 + table.sum() * 0
        zeros = nothing.new_zeros((rows, *dense.shape[1:]))
        return (zeros + nothing if nothing.requires_grad else zeros).to(values.dtype)
    # F.embedding: its gradient adds up the nonzeros of a column in one order, also on a GPU.
    gathered = F.embedding(columns.clamp(0, size - 1), table)
    gathered = torch.where(valid(columns, size)[:, None], gathered, torch.nan)
    products = widened(values)[:, None] * gathered
    y = torch.segment_reduce(products, "sum", offsets=offsets.long(), axis=0, unsafe=True)
    return y.reshape(rows, *dense.shape[1:]).to(values.dtype)


def _implementation(operator: str) -> Implementation:
    return Implementation(
        operator=operator,
        backend="eager",
        forward=forward,
        idea="gather, multiply, sum of segments; all products in memory",
    )


SPMV = _implementation("spmv")
SPMM = _implementation("spmm")
