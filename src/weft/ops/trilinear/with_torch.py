"""Trilinear interpolation as a batch of products (1, 8) x (8, F) by PyTorch, in float32.

``grid_sample`` computes the same within the cube, on features in another order (N, F, 2, 2, 2). It does not
extrapolate, and rearranging the features costs more bytes than the interpolation has.
"""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops.trilinear.spec import corner_weights


def forward(features: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    y = torch.bmm(corner_weights(points)[:, None], features.float())[:, 0]
    return y.to(features.dtype).contiguous()


IMPLEMENTATION = Implementation(
    operator="trilinear",
    backend="torch",
    forward=forward,
    idea="a batched product of weights and features, in float32",
)
