"""Linear layers with a 2:4 sparse weight: for inference and fixed masks, and to train a dense weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft import ops
from weft.core import WeftError
from weft.nn._common import cast
from weft.ops._common.layout import as_matrix
from weft.ops.sparse24 import pattern

GROUP = pattern.GROUP


class SparseLinear(torch.nn.Module):
    """``x @ weight.T + bias`` with a 2:4 sparse weight, which is stored as values and metadata.

    :meth:`from_dense` prunes a ``torch.nn.Linear`` by magnitude. The values are a parameter: they can be
    trained further, with the places of the pruning. The state dict has ``values`` (out, in / 2), ``metadata``
    and ``bias``.

    Args:
        in_features: a multiple of four; of 16 for ``impl="cuda"``.
        out_features: any number; a multiple of eight for ``impl="cuda"``.
        bias: whether the layer adds a bias.
        impl: implementation of ``weft.ops.sparse_linear``; None leaves the choice to dispatch.
    """

    metadata: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        _check_fours("SparseLinear", in_features=in_features)
        dense = torch.nn.Linear(in_features, out_features, bias, device, dtype)
        self.in_features, self.out_features, self.impl = in_features, out_features, impl
        values, metadata = ops.prune_2_4(dense.weight.detach())
        self.values = torch.nn.Parameter(values)
        self.register_buffer("metadata", metadata)
        self.bias = dense.bias

    @classmethod
    def from_dense(cls, linear: torch.nn.Linear, *, impl: str | None = None) -> SparseLinear:
        """Return a layer with the two largest of each four weights of ``linear``, and a copy of its bias.

        Raises:
            WeftError: ``linear.in_features`` is no multiple of four, or its weight is float64.
        """
        sparse = cls.__new__(cls)
        torch.nn.Module.__init__(sparse)
        _check_fours("SparseLinear", in_features=linear.in_features)
        sparse.in_features, sparse.out_features, sparse.impl = linear.in_features, linear.out_features, impl
        values, metadata = ops.prune_2_4(linear.weight.detach())
        sparse.values = torch.nn.Parameter(values)
        sparse.register_buffer("metadata", metadata)
        bias = linear.bias
        sparse.bias = None if bias is None else torch.nn.Parameter(bias.detach().clone())
        return sparse.train(linear.training)

    def to_dense(self) -> torch.nn.Linear:
        """Return a ``torch.nn.Linear`` with the same weight, zeros included."""
        has_bias = self.bias is not None
        options: dict[str, Any] = {"device": self.values.device, "dtype": self.values.dtype}
        dense = torch.nn.Linear(self.in_features, self.out_features, has_bias, **options)
        with torch.no_grad():
            dense.weight.copy_(ops.expand_2_4(self.values, self.metadata))
            if has_bias:
                dense.bias.copy_(self.bias)
        return dense

    def forward(self, input: Tensor) -> Tensor:
        """Map (*, in_features) to (*, out_features)."""
        bias = self.values.new_zeros(self.out_features) if self.bias is None else self.bias
        x, values, bias = cast(input, self.values, bias)
        return ops.sparse_linear(x, values, self.metadata, bias, impl=self.impl)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"


class _SparseProduct(torch.autograd.Function):
    """``x @ W.T + bias`` with W the weight under a mask that is 2:4 for W and its transpose.

    The gradient of x is a sparse product with the transpose. That of the weight is dense: as if W were the
    weight itself (the straight-through estimator), or with ``dense_gradient`` False at the kept places alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mask: Tensor | None,
        dense_gradient: bool,
        impl: str | None,
    ) -> Tensor:
        # Pruning keeps every nonzero element of a weight that a mask has made 2:4 both ways already: it packs
        # the weight in one kernel, and the places stay those of the mask.
        masked = weight.detach() if mask is None else weight.detach() * mask
        values, metadata, values_t, metadata_t = ops.prune_2_4_transposable(masked)
        ctx.save_for_backward(x, metadata, values_t, metadata_t, mask)
        ctx.dense_gradient, ctx.impl = dense_gradient, impl
        return ops.sparse_linear(x, values, metadata, bias, impl=impl)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        x, metadata, values_t, metadata_t, mask = ctx.saved_tensors
        dx = dw = dbias = None
        grad2d = as_matrix(grad)
        if ctx.needs_input_grad[0]:
            dx = ops.sparse_linear(grad, values_t, metadata_t, impl=ctx.impl)
        if ctx.needs_input_grad[1]:
            dw = grad2d.t() @ as_matrix(x)
            if not ctx.dense_gradient and mask is not None:
                dw = dw * mask
            elif not ctx.dense_gradient:
                places = ops.expand_2_4(dw.new_ones(len(dw), dw.shape[1] // 2), metadata)
                dw = dw.where(places != 0, 0)
        if ctx.needs_input_grad[2]:
            dbias = grad2d.sum(0, dtype=torch.float32).to(grad.dtype)
        return dx, dw, dbias, None, None, None


def masked_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor,
    *,
    dense_gradient: bool = False,
    impl: str | None = None,
) -> Tensor:
    """Return ``x @ (weight * mask).T + bias`` by sparse products, as is the gradient of x.

    Args:
        x: (*, in).
        weight: (out, in), both multiples of four, in the dtype of x.
        bias: (out,).
        mask: bool (out, in), of :func:`transposable_mask`: at most two of each four in rows and in columns.
        dense_gradient: the weight's gradient goes to all its elements, not to those of the mask alone.
        impl: implementation of ``weft.ops.sparse_linear``; None leaves the choice to dispatch.
    """
    return _SparseProduct.apply(x, weight, bias, mask, dense_gradient, impl)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def transposable_mask(weight: Tensor) -> Tensor:
    """Return the bool mask (out, in) of the elements that ``weft.ops.prune_2_4_transposable`` keeps.

    An element that is zero is never part of it.
    """
    values, metadata, _, _ = ops.prune_2_4_transposable(weight.detach())
    return ops.expand_2_4(values, metadata) != 0


class SparseTrainingLinear(torch.nn.Linear):
    """A linear layer that trains a dense weight and multiplies with its 2:4 sparse part, also backward.

    Each forward prunes the weight by :func:`weft.ops.prune_2_4_transposable`, so that the mask follows the
    training. Both products with the weight are then sparse; the gradient of the weight is a dense product.
    Arguments, parameters and state dict are those of ``torch.nn.Linear``; sizes are multiples of four.

    Args:
        dense_gradient: the weight's gradient goes also to elements that are pruned, which can come back (the
            straight-through estimator). False: to the places of the mask alone, and where a group has fewer
            than two elements, to the lowest others.
        impl: implementation of ``weft.ops.sparse_linear``; None leaves the choice to dispatch.

    Source: Hubara et al., arXiv:2102.08124; the straight-through estimator: Bengio et al., arXiv:1308.3432.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        dense_gradient: bool = True,
        impl: str | None = None,
    ) -> None:
        _check_fours("SparseTrainingLinear", in_features=in_features, out_features=out_features)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.dense_gradient, self.impl = dense_gradient, impl

    def forward(self, input: Tensor) -> Tensor:
        """Map (*, in_features) to (*, out_features)."""
        bias = self.weight.new_zeros(self.out_features) if self.bias is None else self.bias
        x, weight, bias = cast(input, self.weight, bias)
        return _SparseProduct.apply(x, weight, bias, None, self.dense_gradient, self.impl)  # type: ignore[no-any-return, no-untyped-call]


def _check_fours(name: str, **sizes: int) -> None:
    for argument, size in sizes.items():
        if size % GROUP:
            raise WeftError(f"{name}: {argument}", expected=f"a multiple of {GROUP}", got=size)
