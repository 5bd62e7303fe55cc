"""Bias and GELU by the library: a sum and its GELU, two kernels with a rounding between."""

from __future__ import annotations

import torch

from weft.core import Implementation


def forward(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x + bias, approximate="tanh").contiguous()


IMPLEMENTATION = Implementation(
    operator="bias_gelu",
    name="torch",
    backend="torch",
    forward=forward,
    idea="F.gelu(x + bias, approximate='tanh')",
)
