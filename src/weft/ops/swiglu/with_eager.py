"""SwiGLU composed by hand from torch calls, in float32; ``compile`` fuses them."""

from __future__ import annotations

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._shared.gated import eager


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


IMPLEMENTATION = Implementation(
    operator="swiglu",
    name="eager",
    backend="eager",
    forward=eager(silu),
    idea="torch calls one after another",
)
COMPILED = compiled(IMPLEMENTATION)
