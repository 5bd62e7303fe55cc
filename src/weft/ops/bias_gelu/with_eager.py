"""Bias and GELU composed by hand from torch calls, in float32; ``compile`` fuses them."""

from __future__ import annotations

import math

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation


def forward(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    v = x.float() + bias.float()
    u = math.sqrt(2 / math.pi) * (v + 0.044715 * v * v * v)
    return (0.5 * v * (1 + torch.tanh(u))).to(x.dtype).contiguous()


IMPLEMENTATION = Implementation(
    operator="bias_gelu", name="eager", backend="eager", forward=forward, idea="nine torch calls"
)
COMPILED = compiled(IMPLEMENTATION)
