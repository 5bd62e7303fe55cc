"""Five-point stencil in CUDA C++: warps that march down strips with three rows in registers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, contiguous_like, dtype_name, view_3d
from weft.ops.stencil.spec import POINTS

THREADS = 128
SUM_THREADS = 1024
# Rows of a warp's piece: its two rows at the ends are loaded twice, by it and by its neighbours.
MAX_ROWS, MIN_ROWS = 64, 8
# Pieces that fill a GPU: 32 warps on each of 132 SMs, and two times more for an even end.
MANY_PIECES = 8192


@cache
def source(dtype: torch.dtype, vec_width: int, threads: int = THREADS) -> CudaSource:
    """Return the program for one dtype and width of an access in elements."""
    return CudaSource(
        file=Path(__file__).with_name("stencil.cu"),
        kernels=("stencil", "stencil_backward", "stencil_weights"),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), ("VEC", str(vec_width)), ("THREADS", str(threads))),
        label=f"{dtype_name(dtype)}-{vec_width}",
    )


def vec_width(columns: int, *grids: torch.Tensor) -> int:
    """Return the elements of an access: the most, up to 16 bytes, that every row of these grids allows.

    Narrow grids take shorter accesses, so that all lanes of a warp have columns.
    """
    size = grids[0].element_size()
    union = columns * size
    for x3d in grids:
        batches, rows, _ = x3d.shape
        union |= x3d.data_ptr()
        union |= (x3d.stride(1) if rows > 1 else 0) * size | (x3d.stride(0) if batches > 1 else 0) * size
    access = min(16, union & -union)
    while access > size and columns * size < 32 * access:
        access //= 2
    return access // size


@dataclass(frozen=True)
class Pieces:
    """Cut of grids for warps: strips of columns, and pieces of rows. It depends on the shapes alone."""

    strips: int
    pieces: int
    piece_rows: int
    items: int

    @staticmethod
    def of(batches: int, rows: int, columns: int, width: int) -> Pieces:
        """Return the longest pieces that are many enough for a whole GPU."""
        strips, piece_rows = -(-columns // (32 * width)), MAX_ROWS
        while piece_rows > MIN_ROWS and batches * strips * -(-rows // piece_rows) < MANY_PIECES:
            piece_rows //= 2
        pieces = -(-rows // piece_rows)
        return Pieces(strips, pieces, piece_rows, batches * strips * pieces)


def apply(x: torch.Tensor, weights: torch.Tensor, threads: int = THREADS) -> torch.Tensor:
    """Compute the stencil with blocks of ``threads`` threads."""
    y = contiguous_like(x)
    if x.numel() == 0:
        return y
    x3d = view_3d(x)
    batches, rows, columns = x3d.shape
    width = vec_width(columns, x3d, y.view(x3d.shape))
    cut = Pieces.of(batches, rows, columns, width)
    source(x.dtype, width, threads)["stencil"](
        -(-cut.items // (threads // 32)),
        threads,
        x3d,
        weights.contiguous(),
        y,
        cut.items,
        rows,
        columns,
        x3d.stride(0),
        x3d.stride(1),
        cut.strips,
        cut.pieces,
        cut.piece_rows,
    )
    return y


def gradients(
    grad: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, threads: int = THREADS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of x and of the coefficients with blocks of ``threads`` threads."""
    dx = contiguous_like(x)
    if x.numel() == 0:
        return dx, torch.zeros_like(weights, memory_format=torch.contiguous_format)
    grad3d, x3d = view_3d(grad), view_3d(x)
    batches, rows, columns = x3d.shape
    width = vec_width(columns, grad3d, x3d, dx.view(x3d.shape))
    cut = Pieces.of(batches, rows, columns, width)
    parts = torch.empty((POINTS, cut.items), dtype=torch.float32, device=x.device)
    dweights = contiguous_like(weights)
    program = source(x.dtype, width, threads)
    program["stencil_backward"](
        -(-cut.items // (threads // 32)),
        threads,
        grad3d,
        x3d,
        weights.contiguous(),
        dx,
        parts,
        cut.items,
        rows,
        columns,
        grad3d.stride(0),
        grad3d.stride(1),
        x3d.stride(0),
        x3d.stride(1),
        cut.strips,
        cut.pieces,
        cut.piece_rows,
    )
    program["stencil_weights"](POINTS, min(SUM_THREADS, 8 * threads), parts, dweights, cut.items)
    return dx, dweights


def forward(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return apply(x, weights)


def backward(grad: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gradients(grad, x, weights)


IMPLEMENTATION = Implementation(
    operator="stencil",
    backend="cuda",
    forward=forward,
    backward=backward,
    aot_kernels=tuple(
        source(dtype, width)
        for dtype in FLOAT_DTYPES
        for width in (1, 2, 4, 8)
        if width * dtype.itemsize <= 16
    ),
    idea="warps march down strips with three rows in registers; 16-byte loads, neighbours by shuffle",
)
