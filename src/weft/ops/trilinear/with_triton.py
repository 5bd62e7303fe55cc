"""Trilinear interpolation in Triton: a program has a block of points and of features."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import Implementation

MAX_COLUMNS = 256


@dataclass(frozen=True, kw_only=True)
class Config:
    """A program of ``warps`` warps has ``points`` points and ``columns`` features at a time."""

    points: int
    columns: int
    warps: int = 4


@triton.jit
def sides(points_ptr, n, count, AXIS: tl.constexpr):
    """Return (1 - p) / 2 and (1 + p) / 2 of one coordinate of the points n, as columns (POINTS, 1)."""
    # Apart from each other: 1 - (1 + p) / 2 would lose the digits of a point near a corner.
    p = tl.load(points_ptr + n * 3 + AXIS, mask=n < count, other=0)
    return (1 - p) * 0.5, (1 + p) * 0.5


@triton.jit
def trilinear_forward(
    features_ptr, points_ptr, y_ptr, count, width, POINTS: tl.constexpr, COLUMNS: tl.constexpr
):
    # features: (count, 8, width); points: (count, 3) float32; y: (count, width); all contiguous. A program
    # computes POINTS points and COLUMNS features. Bytes: features and points read, y written, once each.
    slices = tl.cdiv(width, COLUMNS)
    # int64: count * 8 * width may exceed 2^31.
    n = (tl.program_id(0) // slices).to(tl.int64) * POINTS + tl.arange(0, POINTS)[:, None]
    column = (tl.program_id(0) % slices) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (n < count) & (column < width)
    x_low, x_high = sides(points_ptr, n, count, 0)
    y_low, y_high = sides(points_ptr, n, count, 1)
    z_low, z_high = sides(points_ptr, n, count, 2)
    total = tl.zeros((POINTS, COLUMNS), tl.float32)
    for k in tl.static_range(8):
        weight = x_high if k & 4 else x_low
        weight = weight * (y_high if k & 2 else y_low)
        weight = weight * (z_high if k & 1 else z_low)
        f = tl.load(features_ptr + (n * 8 + k) * width + column, mask=inside, other=0)
        total += weight * f.to(tl.float32)
    tl.store(y_ptr + n * width + column, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def trilinear_backward(
    grad_ptr,
    features_ptr,
    points_ptr,
    dfeatures_ptr,
    dpoints_ptr,
    count,
    width,
    POINTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # grad: (count, width); features, dfeatures: (count, 8, width); points, dpoints: (count, 3) float32; all
    # contiguous. A program has POINTS points with all their features, which a point's gradient sums over.
    # Bytes: grad, features and points read, dfeatures and dpoints written, once each.
    n = tl.program_id(0).to(tl.int64) * POINTS + tl.arange(0, POINTS)[:, None]
    x_low, x_high = sides(points_ptr, n, count, 0)
    y_low, y_high = sides(points_ptr, n, count, 1)
    z_low, z_high = sides(points_ptr, n, count, 2)
    dx = tl.zeros((POINTS, COLUMNS), tl.float32)
    dy = tl.zeros((POINTS, COLUMNS), tl.float32)
    dz = tl.zeros((POINTS, COLUMNS), tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        inside = (n < count) & (column < width)
        g = tl.load(grad_ptr + n * width + column, mask=inside, other=0).to(tl.float32)
        for k in tl.static_range(8):
            x = x_high if k & 4 else x_low
            y = y_high if k & 2 else y_low
            z = z_high if k & 1 else z_low
            at = (n * 8 + k) * width + column
            product = g * tl.load(features_ptr + at, mask=inside, other=0).to(tl.float32)
            tl.store(dfeatures_ptr + at, (x * y * z * g).to(dfeatures_ptr.dtype.element_ty), mask=inside)
            # The weight's derivative by a coordinate is the product of the other two, with the corner's sign.
            dx += (y * z if k & 4 else -(y * z)) * product
            dy += (x * z if k & 2 else -(x * z)) * product
            dz += (x * y if k & 1 else -(x * y)) * product
    to = dpoints_ptr + n * 3
    tl.store(to, 0.5 * tl.sum(dx, 1)[:, None], mask=n < count)
    tl.store(to + 1, 0.5 * tl.sum(dy, 1)[:, None], mask=n < count)
    tl.store(to + 2, 0.5 * tl.sum(dz, 1)[:, None], mask=n < count)


@cache
def configure(width: int, itemsize: int, is_backward: bool) -> Config:
    """Return the shipped configuration: 16 bytes of a corner for each of 128 threads, where rows allow.

    The backward has three sums for each element, and takes four elements a thread. Rows of few features take
    no more than one point a thread: with more, both kernels spilled registers.
    """
    columns = min(MAX_COLUMNS, triton.next_power_of_2(width))
    elements = 128 * (4 if is_backward else 16 // itemsize)
    return Config(points=max(1, min(128, elements // columns)), columns=columns)


def forward(features: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    count, _, width = features.shape
    y = features.new_empty((count, width))
    if y.numel():
        config = configure(width, features.element_size(), False)
        grid = (triton.cdiv(count, config.points) * triton.cdiv(width, config.columns),)
        trilinear_forward[grid](
            features.contiguous(),
            points.contiguous(),
            y,
            count,
            width,
            POINTS=config.points,
            COLUMNS=config.columns,
            num_warps=config.warps,
        )
    return y


def backward(
    grad: torch.Tensor, features: torch.Tensor, points: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    count, _, width = features.shape
    dfeatures = torch.empty_like(features, memory_format=torch.contiguous_format)
    dpoints = torch.empty_like(points, memory_format=torch.contiguous_format)
    if not grad.numel():
        return dfeatures, dpoints.zero_()
    config = configure(width, features.element_size(), True)
    trilinear_backward[(triton.cdiv(count, config.points),)](
        grad.contiguous(),
        features.contiguous(),
        points.contiguous(),
        dfeatures,
        dpoints,
        count,
        width,
        POINTS=config.points,
        COLUMNS=config.columns,
        num_warps=config.warps,
    )
    return dfeatures, dpoints


def _aot_kernel(kernel: Any, kind: str, itemsize: int, width: int) -> TritonAotKernel:
    is_forward = kernel is trilinear_forward
    config = configure(width, itemsize, not is_forward)
    names = (
        ("features", "points", "y") if is_forward else ("grad", "features", "points", "dfeatures", "dpoints")
    )
    pointers = {f"{n}_ptr": "*fp32" if n.endswith("points") else f"*{kind}" for n in names}
    return TritonAotKernel(
        label=f"{kernel.__name__}-{kind}-{width}",
        kernel=kernel,
        signature={
            **pointers,
            "count": "i32:16",
            "width": "i32:16" if width % 16 == 0 else "i32",
            "POINTS": config.points,
            "COLUMNS": config.columns,
        },
        num_warps=config.warps,
    )


IMPLEMENTATION = Implementation(
    operator="trilinear",
    backend="triton",
    forward=forward,
    backward=backward,
    aot_kernels=tuple(
        _aot_kernel(kernel, kind, itemsize, width)
        for kernel in (trilinear_forward, trilinear_backward)
        for kind, itemsize, width in (("fp32", 4, 256), ("bf16", 2, 32), ("fp16", 2, 2))
    ),
    idea="all corners in one pass; a point's gradient is summed in registers",
)
