"""Trilinear interpolation in CUDA C++: eight vectors in flight for each thread; see trilinear.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._common.layout import CUDA_TYPES, contiguous_like, dtype_name, max_vec_width

THREADS = 128  # the constant of trilinear.cu
MAX_LANES = 32


@cache
def source(dtype: torch.dtype, vec_width: int, lanes: int) -> CudaSource:
    """Return trilinear.cu for one element type, vectors of ``vec_width`` and ``lanes`` lanes for a point."""
    return CudaSource(
        file=Path(__file__).with_name("trilinear.cu"),
        kernels=("trilinear_forward", "trilinear_backward"),
        defines=(
            ("WEFT_T", CUDA_TYPES[dtype]),
            ("VEC_WIDTH", str(vec_width)),
            ("LANES", str(lanes)),
        ),
        label=f"{dtype_name(dtype)}-{vec_width}-{lanes}",
    )


def _choose(width: int, *rows: torch.Tensor) -> tuple[int, int]:
    """Return the width of a vector that fits all rows, and the lanes that share a point in the backward.

    The lanes are a power of two, so that shuffles stay among them, and no more than there are vectors.
    """
    vec_width = max_vec_width(width, *(r.view(-1, width) for r in rows))
    vectors = width // vec_width
    return vec_width, min(MAX_LANES, 1 << (vectors - 1).bit_length())


def forward(features: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    count, _, width = features.shape
    y = features.new_empty((count, width))
    if not y.numel():
        return y
    features = features.contiguous()
    vec_width, lanes = _choose(width, features, y)
    blocks = -(-count * (width // vec_width) // THREADS)
    program = source(features.dtype, vec_width, lanes)
    program["trilinear_forward"](blocks, THREADS, features, points.contiguous(), y, count, width)
    return y


def backward(
    grad: torch.Tensor, features: torch.Tensor, points: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    count, _, width = features.shape
    dfeatures, dpoints = contiguous_like(features), contiguous_like(points)
    if not grad.numel():
        return dfeatures, dpoints.zero_()
    grad, features = grad.contiguous(), features.contiguous()
    vec_width, lanes = _choose(width, grad, features, dfeatures)
    source(features.dtype, vec_width, lanes)["trilinear_backward"](
        -(-count * lanes // THREADS),
        THREADS,
        grad,
        features,
        points.contiguous(),
        dfeatures,
        dpoints,
        count,
        width,
    )
    return dfeatures, dpoints


IMPLEMENTATION = Implementation(
    operator="trilinear",
    backend="cuda",
    forward=forward,
    backward=backward,
    aot_kernels=(
        source(torch.float32, 4, 32),
        source(torch.float32, 1, 1),
        source(torch.bfloat16, 8, 4),
        source(torch.float16, 2, 1),
    ),
    idea="eight vectors in flight for each thread; a point's gradient by shuffles",
)
