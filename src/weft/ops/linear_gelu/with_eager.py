"""A linear layer and GELU composed by hand: a product, the bias, and GELU in eight calls."""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, keep: bool = True) -> Any:
    pre = torch.matmul(x, weight.t()) + bias
    wide = pre.float()
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    y = (0.5 * wide * (1 + torch.tanh(u))).to(x.dtype)
    return (y, pre.detach()) if keep else y


IMPLEMENTATION = Implementation(
    operator="linear_gelu",
    name="eager",
    backend="eager",
    forward=forward,
    idea="a product, then ten passes",
)
COMPILED = compiled(IMPLEMENTATION)
