"""The product with a weight in blocks, in torch calls: gather, products of blocks, sums of segments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core import Implementation
from weft.ops._common.layout import as_matrix
from weft.ops.block_sparse.blocks import is_inside


def forward(x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor, bias: Tensor) -> Tensor:
    """Compute all products of blocks in float32, (blocks, M, b), then add up those of each row of blocks."""
    count, block, _ = values.shape
    x2d, rows = as_matrix(x).float(), crow.shape[0] - 1
    m, columns = x2d.shape[0], x2d.shape[1] // block
    if 0 in (count, rows, columns, m):
        # Sums of nothing, which still have a gradient of zeros.
        nothing = x2d.sum() * 0 + values.float().sum() * 0
        sums = x2d.new_zeros((rows, m, block)) + (nothing if nothing.requires_grad else 0)
    else:
        strips = x2d.view(m, columns, block).transpose(0, 1).reshape(columns, m * block)
        # F.embedding: its gradient adds up the blocks of a column in one order, also on a GPU.
        gathered = F.embedding(col.clamp(0, columns - 1), strips).view(count, m, block)
        products = torch.bmm(gathered, values.float().transpose(1, 2))
        products = torch.where(is_inside(col, columns)[:, None, None], products, 0.0)
        offsets = crow.long()
        sums = torch.segment_reduce(products.flatten(1), "sum", offsets=offsets, axis=0, unsafe=True)
    y = sums.view(rows, m, block).transpose(0, 1).reshape(m, rows * block) + bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], rows * block)


IMPLEMENTATION = Implementation(
    operator="block_sparse_linear",
    backend="eager",
    forward=forward,
    idea="gather columns of x, a product for each block, sum of segments; all products in memory",
)
