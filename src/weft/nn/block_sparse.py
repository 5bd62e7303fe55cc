"""A linear layer whose weight is stored in blocks (BSR), for inference and for training with fixed places."""

from __future__ import annotations

import torch
from torch import Tensor

from weft import ops
from weft.nn._common import cast
from weft.ops.block_sparse import to_blocks, to_dense, transposed_index
from weft.ops.block_sparse.blocks import check_sizes


class BlockSparseLinear(torch.nn.Module):
    """``x @ weight.T + bias`` with a weight of square blocks, of which a share is stored.

    :meth:`from_linear` keeps the blocks of largest norm of a ``torch.nn.Linear``. The blocks are a parameter:
    they can be trained further, at the places of the pruning. The index that the gradient of x needs is
    computed once. The state dict has ``values`` (blocks, block, block), ``crow``, ``col``, ``transposed`` and
    ``bias``.

    Args:
        in_features: a multiple of ``block``.
        out_features: a multiple of ``block``.
        block: side of a block: 16, 32, 64 or 128. ``impl="cuda"`` takes 64 and 128.
        density: share of the blocks that are stored, 0 to 1.
        bias: whether the layer adds a bias.
        impl: implementation of ``weft.ops.block_sparse_linear``; None leaves the choice to dispatch.
    """

    crow: Tensor
    col: Tensor
    transposed: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block: int,
        density: float,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        check_sizes("BlockSparseLinear", block, in_features=in_features, out_features=out_features)
        self._prune(torch.nn.Linear(in_features, out_features, bias, device, dtype), block, density, impl)

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, block: int, density: float, *, impl: str | None = None
    ) -> BlockSparseLinear:
        """Return a layer with the blocks of ``linear`` that have the largest norm, and a copy of its bias.

        Raises:
            WeftError: a size of ``linear`` is no multiple of ``block``, or block or density is out of range.
        """
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        check_sizes("BlockSparseLinear", block, **sizes)
        sparse = cls.__new__(cls)
        torch.nn.Module.__init__(sparse)
        sparse._prune(linear, block, density, impl)
        return sparse.train(linear.training)

    def _prune(self, linear: torch.nn.Linear, block: int, density: float, impl: str | None) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.block, self.impl = block, impl
        values, crow, col = to_blocks(linear.weight, block, density)
        self.values = torch.nn.Parameter(values)
        self.register_buffer("crow", crow)
        self.register_buffer("col", col)
        self.register_buffer("transposed", transposed_index(crow, col, linear.in_features // block))
        bias = linear.bias
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach().clone())

    def to_dense(self) -> torch.nn.Linear:
        """Return a ``torch.nn.Linear`` with the same weight, zeros included."""
        has_bias = self.bias is not None
        values = self.values.detach()
        dense = torch.nn.Linear(
            self.in_features, self.out_features, has_bias, device=values.device, dtype=values.dtype
        )
        with torch.no_grad():
            dense.weight.copy_(to_dense(values, self.crow, self.col, self.in_features))
            if self.bias is not None:
                dense.bias.copy_(self.bias)
        return dense.train(self.training)

    def forward(self, input: Tensor) -> Tensor:
        """Map (*, in_features) to (*, out_features)."""
        bias = self.values.new_zeros(self.out_features) if self.bias is None else self.bias
        x, values, bias = cast(input, self.values, bias)
        return ops.block_sparse_linear(x, values, self.crow, self.col, self.transposed, bias, impl=self.impl)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, block={self.block}, blocks={len(self.values)}, bias={self.bias is not None}"
