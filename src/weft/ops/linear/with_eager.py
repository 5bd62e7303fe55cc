"""A linear layer composed by hand: a product, then the bias in a pass of its own."""

from __future__ import annotations

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x, weight.t()) + bias


IMPLEMENTATION = Implementation(
    operator="linear",
    name="eager",
    backend="eager",
    forward=forward,
    idea="a product, then the bias",
)
COMPILED = compiled(IMPLEMENTATION)
