"""The linear family composed by hand from torch calls, and ``torch.compile`` of that."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._common.products import by_rows
from weft.ops._common.products.by_rows import Product
from weft.ops.linear.products import to_2d


def linear_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, product: Product = torch.matmul
) -> torch.Tensor:
    return product(x, weight.t()) + bias


def linear_gelu_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    keep: bool = True,
    product: Product = torch.matmul,
) -> Any:
    pre = product(x, weight.t()) + bias
    wide = pre.float()
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    y = (0.5 * wide * (1 + torch.tanh(u))).to(x.dtype)
    return (y, pre.detach()) if keep else y


def linear_residual_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    *,
    product: Product = torch.matmul,
) -> torch.Tensor:
    return product(x, weight.t()) + bias + residual


def linear_residual_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, product: Product = torch.mm
) -> tuple[torch.Tensor, ...]:
    """Return dx, dW, db and a copy of the gradient: autograd would return the gradient itself."""
    grad2d = to_2d(grad)
    dx, dweight = product(grad2d, weight), torch.mm(grad2d.t(), to_2d(x))
    return dx.view(x.shape), dweight, grad2d.sum(0), grad.clone()


LINEAR = by_rows.with_rows(
    Implementation(
        operator="linear",
        backend="eager",
        forward=linear_forward,
        idea="a product, then the bias",
    )
)
LINEAR_COMPILED = compiled(LINEAR)

LINEAR_GELU = by_rows.with_rows(
    Implementation(
        operator="linear_gelu",
        backend="eager",
        forward=linear_gelu_forward,
        idea="a product, then ten passes",
    )
)
LINEAR_GELU_COMPILED = compiled(LINEAR_GELU)

LINEAR_RESIDUAL = by_rows.with_rows(
    Implementation(
        operator="linear_residual",
        backend="eager",
        forward=linear_residual_forward,
        backward=linear_residual_backward,
        idea="a product and two passes",
    )
)
LINEAR_RESIDUAL_COMPILED = replace(
    compiled(LINEAR_RESIDUAL),
    backward=compiled(replace(LINEAR_RESIDUAL, forward=linear_residual_backward)).forward,
)
