"""Shared parts of products: those of cuBLAS at the operators' precision, 2-D views, checks of arguments."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from weft.ops._common.cublas import call_at_precision


class Operands(NamedTuple):
    """The tensors of one launch of a Triton product. ``pre`` takes the pre-activation."""

    x2d: torch.Tensor  # (M, K)
    weight: torch.Tensor  # (N, K)
    bias: torch.Tensor  # (N,)
    residual2d: torch.Tensor | None  # (M, N)
    y: torch.Tensor  # (..., N)
    pre: torch.Tensor | None  # (..., N)


def to_2d(x: torch.Tensor) -> torch.Tensor:
    """``x`` (..., K) as (M, K): a view where the strides allow one, else a copy."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def row_pitch(x: torch.Tensor) -> int:
    """Elements from one row of ``x`` (..., C) to the next. More than two dimensions have no gaps."""
    return x.stride(0) if x.dim() == 2 else x.shape[-1]


def library_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b by cuBLAS, which adds the bias, if there is one, in its epilogue."""
    return call_at_precision(torch.nn.functional.linear, x, "ieee", x, weight, bias)  # type: ignore[no-any-return]


def backward_products(
    grad2d: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx = grad W, of x's shape, and dW = grad^T x, for grad (M, N), x (..., K), weight (N, K)."""
    return call_at_precision(_backward_products, grad2d, "ieee", grad2d, x, weight)  # type: ignore[no-any-return]


def _backward_products(
    grad2d: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.mm(grad2d, weight).view(x.shape), torch.mm(grad2d.t(), to_2d(x))


def bias_or_zeros(weight: Any, bias: Any) -> Any:
    """Return ``bias``, or zeros for a None; the check of arguments refuses a weight that is no matrix."""
    if bias is not None:
        return bias
    # The kernels always add a bias: a second set of kernels without it would save N bytes of M N.
    is_matrix = isinstance(weight, torch.Tensor) and not weight.is_nested and weight.dim() == 2
    # A quantised tensor is not floating, and cannot make zeros of its kind.
    return weight.new_zeros(weight.shape[0]) if is_matrix and weight.is_floating_point() else None


def needs_gradient(inputs: tuple[Any, ...]) -> bool:
    """Return True if autograd records a call with these arguments."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
