"""Rotary embedding composed by hand from torch calls, in float32; ``compile`` fuses them."""

from __future__ import annotations

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.core.implementation import with_invariant


def forward(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    wide = x.float()
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        y = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = wide.chunk(2, -1)
        y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return y.to(x.dtype).contiguous()


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="rope",
        backend="eager",
        forward=forward,
        idea="halves, four products, one cat",
    ),
    devices=("cpu",),
)
COMPILED = compiled(IMPLEMENTATION)
