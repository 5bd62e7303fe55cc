"""Trilinear interpolation; README.md has its implementations and times."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.ops.trilinear.spec import check_arguments


def _contiguous(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


register(
    "trilinear",
    Schema(
        inputs="Tensor features, Tensor points",
        saved="Tensor features, Tensor points",
        gradients=2,
        fake=lambda features, points: features.new_empty((features.shape[0], features.shape[2])),
        fake_backward=lambda grad, features, points: (_contiguous(features), _contiguous(points)),
    ),
)


def trilinear(
    features: torch.Tensor, points: torch.Tensor, *, impl: str | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """Interpolate features at the eight corners of a cube, one cube for each point.

    Args:
        features: (N, 8, F) at the corners; float32, float16 or bfloat16; CPU or CUDA. Corner k = 4 bx + 2 by
            + bz has the coordinates (2 bx - 1, 2 by - 1, 2 bz - 1).
        points: (N, 3) float32 coordinates, in [-1, 1] inside of the cube. Outside of it they extrapolate.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: no implementation declares it.

    Returns:
        (N, F), contiguous, of ``features``' dtype and device; arithmetic is in float32, rounded once.
        Differentiable in both arguments.

    Raises:
        WeftError: shapes, dtypes or devices do not match; ``impl`` is unknown or does not run here.

    Source: the interpolation within a voxel of Müller et al., "Instant Neural Graphics Primitives with a
    Multiresolution Hash Encoding" (arXiv:2201.05989).
    """
    inputs = (features, points)
    return call("trilinear", inputs, {}, impl, lambda: check_arguments(*inputs), batch_invariant)  # type: ignore[no-any-return]
