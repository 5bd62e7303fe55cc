"""A linear layer and a residual by the library: cuBLAS adds the bias, a pass the residual."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared.linear_library import held, products
from weft.ops._shared.linear_spec import rows_of


def _two(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    y = torch.nn.functional.linear(x, weight, bias) + residual
    return y.contiguous()  # a sum takes on the residual's strides


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    return held(_two, x, weight, bias, residual)  # type: ignore[no-any-return]


def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dresidual is a copy: nothing that a backward returns shares its memory with the gradient."""
    lines = rows_of(grad)
    return (*products(lines, x, weight), lines.sum(0), grad.clone())


# What an outer torch.compile traces: it cannot trace a process-wide switch.
forward.compiles = _two  # type: ignore[attr-defined]

IMPLEMENTATION = Implementation(
    operator="linear_residual",
    name="torch",
    backend="torch",
    forward=forward,
    backward=backward,
    idea="F.linear, then a sum",
)
