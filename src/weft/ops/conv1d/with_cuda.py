"""Depthwise causal convolution in CUDA C++: 16-byte accesses, neighbours by shuffles; see conv1d.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, contiguous_like, dtype_name, view_3d

THREADS = 128
# Accesses of a thread along its row. Forward a warp has few of them: with 32, rows of 4096 elements were six
# times the warps that run together, and half a warp's time passed at the end with a part of the SMs idle.
# Backward, a warp's sums cost little beside 32 accesses.
MAX_STEPS, MAX_BACKWARD_STEPS, MIN_STEPS = 8, 32, 4
# Pieces that fill a GPU: 32 warps on each of 132 SMs, and two times more for an even end.
MANY_PIECES = 8192
AOT_TAPS = (2, 4, 8)


@cache
def source(dtype: torch.dtype, vec_width: int, taps: int, threads: int = THREADS) -> CudaSource:
    """Return the program for one dtype, width of an access in elements, and number of coefficients."""
    numbers = (("VEC", vec_width), ("TAPS", taps), ("THREADS", threads))
    return CudaSource(
        file=Path(__file__).with_name("conv1d.cu"),
        kernels=("conv1d", "conv1d_backward", "conv1d_sums"),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), *((name, str(value)) for name, value in numbers)),
        label=f"{dtype_name(dtype)}-{vec_width}-k{taps}",
    )


def vec_width(length: int, *rows: torch.Tensor) -> int:
    """Return the elements of an access: the most, up to 16 bytes, that every row of these tensors allows.

    Short rows take shorter accesses, so that all lanes of a warp have elements.
    """
    size = rows[0].element_size()
    union = length * size
    for x in rows:
        batches, channels, _ = x.shape
        union |= x.data_ptr()
        union |= (x.stride(1) if channels > 1 else 0) * size | (x.stride(0) if batches > 1 else 0) * size
    access = min(16, union & -union)
    while access > size and length * size < 32 * access:
        access //= 2
    return access // size


@dataclass(frozen=True)
class Pieces:
    """Cut of rows for warps: pieces of each row. It depends on the shapes alone."""

    pieces: int
    piece_size: int
    items: int

    @staticmethod
    def of(rows: int, length: int, width: int, max_steps: int) -> Pieces:
        """Return the longest pieces that are many enough for a whole GPU."""
        steps = max_steps
        while steps > MIN_STEPS and rows * -(-length // (steps * 32 * width)) < MANY_PIECES:
            steps //= 2
        pieces = -(-length // (steps * 32 * width))
        return Pieces(pieces, steps * 32 * width, rows * pieces)


def apply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, threads: int = THREADS) -> torch.Tensor:
    """Compute the convolution with blocks of ``threads`` threads."""
    y = contiguous_like(x)
    if x.numel() == 0:
        return y
    x3d = view_3d(x)
    batches, channels, length = x3d.shape
    width = vec_width(length, x3d, y)
    cut = Pieces.of(batches * channels, length, width, MAX_STEPS)
    source(x.dtype, width, weight.shape[1], threads)["conv1d"](
        -(-cut.items // (threads // 32)),
        threads,
        x3d,
        weight.contiguous(),
        bias.contiguous(),
        y,
        cut.items,
        channels,
        length,
        x3d.stride(0),
        x3d.stride(1),
        cut.pieces,
        cut.piece_size,
    )
    return y


def gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, threads: int = THREADS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of x, weight and bias with blocks of ``threads`` threads."""
    dx, dweight, dbias = contiguous_like(x), contiguous_like(weight), weight.new_empty(weight.shape[0])
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    grad3d, x3d = view_3d(grad), view_3d(x)
    batches, channels, length = x3d.shape
    taps = weight.shape[1]
    width = vec_width(length, grad3d, x3d, dx)
    cut = Pieces.of(batches * channels, length, width, MAX_BACKWARD_STEPS)
    # A row for each coefficient and each bias.
    rows, count = channels * (taps + 1), batches * cut.pieces
    parts = torch.empty((rows, count), dtype=torch.float32, device=x.device)
    program = source(x.dtype, width, taps, threads)
    warps = threads // 32
    program["conv1d_backward"](
        -(-cut.items // warps),
        threads,
        grad3d,
        x3d,
        weight.contiguous(),
        dx,
        parts,
        cut.items,
        channels,
        length,
        grad3d.stride(0),
        grad3d.stride(1),
        x3d.stride(0),
        x3d.stride(1),
        cut.pieces,
        cut.piece_size,
    )
    program["conv1d_sums"](-(-rows // warps), threads, parts, dweight, dbias, rows, count)
    return dx, dweight, dbias


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return apply(x, weight, bias)


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return gradients(grad, x, weight)


IMPLEMENTATION = Implementation(
    operator="conv1d",
    backend="cuda",
    forward=forward,
    backward=backward,
    aot_kernels=tuple(
        source(dtype, width, taps)
        for dtype in FLOAT_DTYPES
        for width in (1, 16 // dtype.itemsize)
        for taps in AOT_TAPS
    ),
    idea="16-byte accesses along a row, coefficients in registers, neighbours by shuffle",
)
