"""GEGLU composed by hand from torch calls, in float32; ``compile`` fuses them."""

from __future__ import annotations

import math

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._shared.gated import eager


def gelu(x: torch.Tensor) -> torch.Tensor:
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(u))


IMPLEMENTATION = Implementation(
    operator="geglu",
    name="eager",
    backend="eager",
    forward=eager(gelu),
    idea="torch calls one after another",
)
COMPILED = compiled(IMPLEMENTATION)
