"""GELU by the library: one fused kernel each way."""

from __future__ import annotations

import torch

from weft.core import Implementation


def forward(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


IMPLEMENTATION = Implementation(
    operator="gelu",
    name="torch",
    backend="torch",
    forward=forward,
    idea="F.gelu, approximate='tanh'",
)
