"""The five-point stencil on 2-D grids; README.md has its implementations, ladder and times."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.ops._common.layout import contiguous_like
from weft.ops.stencil.spec import check_arguments

register(
    "stencil",
    Schema(
        inputs="Tensor x, Tensor weights",
        saved="Tensor x, Tensor weights",
        gradients=2,
        fake=lambda x, weights: contiguous_like(x),
        fake_backward=lambda grad, x, weights: (contiguous_like(x), contiguous_like(weights)),
    ),
)


def stencil(x: torch.Tensor, weights: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Return a weighted sum of each cell of a grid and its four neighbours.

    y[i, j] = c x[i, j] + n x[i-1, j] + s x[i+1, j] + w x[i, j-1] + e x[i, j+1]. A neighbour
    outside the grid adds nothing, whatever its coefficient.

    Args:
        x: (..., H, W) grids of any strides; float32, float16 or bfloat16; CPU or CUDA.
        weights: (5,) coefficients in the order centre, north, south, west, east; dtype and device of ``x``.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        A contiguous tensor with the shape, dtype and device of ``x``. Sums are in float32 and rounded
        once. Both arguments have gradients; that of ``weights`` has the same bits in each run.

    Raises:
        WeftError: an argument is no tensor of these dimensions, dtypes and devices; ``impl`` is unknown or
            does not run here.

    Source: P. Micikevicius, "3D finite difference computation on GPUs using CUDA", GPGPU-2 (2009), whose
    march through planes is here a march through rows.
    """
    return call("stencil", (x, weights), {}, impl, lambda: check_arguments(x, weights))  # type: ignore[no-any-return]
