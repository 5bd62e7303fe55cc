"""Trilinear interpolation composed of torch calls, in float32; ``compile`` fuses them."""

from __future__ import annotations

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops.trilinear.spec import CORNERS, corner_weights


def forward(features: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    weights, wide = corner_weights(points), features.float()
    y = weights[:, 0, None] * wide[:, 0]
    for k in range(1, CORNERS):
        y = y + weights[:, k, None] * wide[:, k]
    return y.to(features.dtype).contiguous()


IMPLEMENTATION = Implementation(
    operator="trilinear",
    backend="eager",
    forward=forward,
    idea="eight products and their sum",
)
COMPILED = compiled(IMPLEMENTATION)
