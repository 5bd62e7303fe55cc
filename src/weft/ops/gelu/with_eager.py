"""GELU composed by hand from torch calls: eight passes over memory; ``compile`` fuses them."""

from __future__ import annotations

import math

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation


def forward(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + torch.tanh(u))).to(x.dtype)


IMPLEMENTATION = Implementation(
    operator="gelu", name="eager", backend="eager", forward=forward, idea="eight torch calls"
)
COMPILED = compiled(IMPLEMENTATION)
