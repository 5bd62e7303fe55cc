"""A linear layer and a residual composed by hand: a product and two passes."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._shared.linear_spec import rows_of


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    return torch.matmul(x, weight.t()) + bias + residual


def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """By hand too: autograd would hand on the gradient itself as the residual's, not a copy."""
    lines = rows_of(grad)
    dx, dweight = torch.mm(lines, weight), torch.mm(lines.t(), rows_of(x))
    return dx.view(x.shape), dweight, lines.sum(0), grad.clone()


IMPLEMENTATION = Implementation(
    operator="linear_residual",
    name="eager",
    backend="eager",
    forward=forward,
    backward=backward,
    idea="a product and two passes",
)
COMPILED = replace(
    compiled(IMPLEMENTATION),
    backward=compiled(replace(IMPLEMENTATION, forward=backward)).forward,
)
