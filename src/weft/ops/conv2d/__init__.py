"""Convolution of images; README.md has its implementations, ladder and times."""

from __future__ import annotations

import torch

from weft.dispatch.autocast import lowered
from weft.dispatch.operator import Schema, call, register
from weft.ops._common.layout import contiguous_like
from weft.ops.conv2d.spec import check_arguments, empty_output

register(
    "conv2d",
    Schema(
        inputs="Tensor x, Tensor weight, int padding",
        saved="Tensor x, Tensor weight, int padding",
        gradients=2,
        params=("padding",),
        fake=empty_output,
        fake_gets_params=True,
        fake_backward=lambda grad, x, weight: (contiguous_like(x), contiguous_like(weight)),
    ),
)


def conv2d(
    x: torch.Tensor, weight: torch.Tensor, *, padding: int = 0, impl: str | None = None
) -> torch.Tensor:
    """Return the convolution of images with stride 1, as ``torch.nn.functional.conv2d`` computes it.

    y[n, o, i, j] = sum over c, r, s of weight[o, c, r, s] x[n, c, i + r - padding, j + s - padding]; pixels
    outside the image are 0.

    Args:
        x: (N, C, H, W) of any strides; float32, float16 or bfloat16; CPU or CUDA.
        weight: (O, C, R, S), with R and S of at least 1; dtype and device of ``x``.
        padding: rows and columns of zeros on each side.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        (N, O, H + 2 padding - R + 1, W + 2 padding - S + 1), contiguous, with the dtype and device of ``x``.
        Sums are in float32 and rounded once. Both tensors have gradients.

    Raises:
        WeftError: the arguments are no tensors of these shapes, of one dtype and device; the window does not
            fit the padded image; ``impl`` is unknown or does not run here.

    Source: implicit products: S. Chetlur et al., "cuDNN: Efficient primitives for deep learning"
    (arXiv:1410.0759).
    """
    inputs = lowered(x, weight)
    params = {"padding": padding}
    return call("conv2d", inputs, params, impl, lambda: check_arguments(*inputs, **params))  # type: ignore[no-any-return]
