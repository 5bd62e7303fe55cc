"""Sparse products in CUDA C++. spmv.cu gives each block the same number of nonzeros, spmm.cu the same number
of rows plus nonzeros (the merge path)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, dtype_name, max_vec_width
from weft.ops.sparse import transpose_cuda

HERE = Path(__file__).parent
DTYPES = (*FLOAT_DTYPES, torch.float64)
VEC_WIDTH = 4  # nonzeros of an access


@dataclass(frozen=True, kw_only=True)
class Config:
    """A block of ``threads`` threads, a power of two, each with ``items`` nonzeros, a multiple of four.

    ``resident`` is the threads of an SM that the registers leave room for, ``hint`` the caches that the
    matrix passes (sparse.cuh), and ``fill`` the rows of a group of lanes where all rows are equally long.
    """

    threads: int = 256
    items: int = 8
    resident: int = 1536
    hint: int = 1
    fill: int = 1

    @property
    def tile(self) -> int:
        """Return the nonzeros of a block, which are also the rows of a share."""
        return self.threads * self.items


@dataclass(frozen=True, kw_only=True)
class MatrixConfig:
    """A block of spmm: groups of lanes with ``share`` places of the merge path each."""

    threads: int = 256
    share: int = 32

    def tile(self, lanes: int) -> int:
        return self.threads // lanes * self.share


# Candidates for a tuning on the device: registers, rows of a group, caches, and sizes of tiles. With room for
# 2048 threads some types spill 8 to 32 bytes, in the search alone.
CANDIDATES = (
    Config(),
    Config(fill=2),
    Config(hint=0),
    Config(hint=2),
    Config(resident=2048),
    Config(resident=2048, fill=2),
    Config(items=4, resident=2048),
    Config(items=16, resident=1024),
    Config(items=16, resident=1280),
    Config(threads=128),
    Config(threads=128, fill=2),
    Config(threads=128, items=16, resident=1024),
    Config(threads=512),
)
SHIPPED = CANDIDATES[0]
SHIPPED_MATRIX = MatrixConfig()
# A kernel with 32-bit offsets adds to a row number up to the rows of a share and the distances of a search.
MAX_ROWS_INT32 = 2**31 - 2**17
MIN_LANES = 4  # of a group: fewer need more shared memory than a block has


@cache
def source(dtype: torch.dtype, offsets: torch.dtype, vec_width: int, config: Config = SHIPPED) -> CudaSource:
    """Return the program of spmv for one dtype, one type of offsets and one vector width in elements."""
    numbers = {
        "VEC_WIDTH": vec_width,
        "THREADS": config.threads,
        "ITEMS": config.items,
        "THREADS_A_SM": config.resident,
        "HINT": config.hint,
        "FILL": config.fill,
        "OVERLAP": 1,
    }
    return CudaSource(
        file=HERE / "spmv.cu",
        kernels=("spmv_tiles", "spmv_carry"),
        defines=(
            ("WEFT_T", CUDA_TYPES[dtype]),
            ("OFFSET_BITS", str(8 * offsets.itemsize)),
            *((name, str(number)) for name, number in numbers.items()),
        ),
        label=f"spmv-{dtype_name(dtype)}-{dtype_name(offsets)}-{vec_width}",
    )


def vec_width_of(values: Tensor, columns: Tensor) -> int:
    """Return the nonzeros of an access: four, or one where four are not aligned."""
    aligned = values.data_ptr() % min(16, VEC_WIDTH * values.element_size()) == 0
    return VEC_WIDTH if aligned and columns.data_ptr() % 16 == 0 else 1


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a kernel's sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spmv(values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor, config: Config = SHIPPED) -> Tensor:
    """Compute the product with one configuration."""
    rows, nonzeros = offsets.shape[0] - 1, values.shape[0]
    y = x.new_empty(rows)
    if rows == 0:
        return y
    values, columns, offsets, x = (t.contiguous() for t in (values, columns, offsets, x))
    if rows > MAX_ROWS_INT32:
        offsets = offsets.long()
    program = source(values.dtype, offsets.dtype, vec_width_of(values, columns), config)
    tiles, shares = max(1, -(-nonzeros // config.tile)), -(-rows // config.tile)
    tail_rows = torch.empty(tiles, dtype=torch.int64, device=x.device)
    heads, tails = torch.empty((2, tiles), dtype=accumulator(x.dtype), device=x.device)
    program["spmv_tiles"](
        max(tiles, shares),
        config.threads,
        *(values, columns, offsets, x, y, tail_rows, heads, tails),
        *(rows, nonzeros, x.shape[0], tiles, rows / max(nonzeros, 1)),
    )
    if tiles > 1:
        blocks = -(-tiles // config.threads)
        arguments = (offsets, y, tail_rows, heads, tails, nonzeros, tiles)
        program["spmv_carry"](blocks, config.threads, *arguments, overlap=True)
    return y


@cache
def matrix_source(
    dtype: torch.dtype,
    offsets: torch.dtype,
    vec_width: int,
    lanes: int,
    config: MatrixConfig = SHIPPED_MATRIX,
) -> CudaSource:
    """Return the program of spmm for groups of ``lanes`` lanes with ``vec_width`` columns of b each."""
    numbers = {"VEC_WIDTH": vec_width, "LANES": lanes, "THREADS": config.threads, "SHARE": config.share}
    return CudaSource(
        file=HERE / "spmm.cu",
        kernels=("spmm_merge", "spmm_carry"),
        defines=(
            ("WEFT_T", CUDA_TYPES[dtype]),
            ("OFFSET_BITS", str(8 * offsets.itemsize)),
            *((name, str(number)) for name, number in numbers.items()),
        ),
        label=f"spmm-{dtype_name(dtype)}-{dtype_name(offsets)}-{lanes}x{vec_width}",
    )


def lanes_of(k: int, vec_width: int) -> int:
    """Return the lanes of a group, a power of two: enough for k columns, at most a warp."""
    return min(32, max(MIN_LANES, 1 << (-(-k // vec_width) - 1).bit_length()))


def spmm(
    values: Tensor, columns: Tensor, offsets: Tensor, b: Tensor, config: MatrixConfig = SHIPPED_MATRIX
) -> Tensor:
    """Compute the product with a dense matrix with one configuration."""
    rows, nonzeros, k = offsets.shape[0] - 1, values.shape[0], b.shape[1]
    y = b.new_empty((rows, k))
    if y.numel() == 0:
        return y
    values, columns, offsets, b = (t.contiguous() for t in (values, columns, offsets, b))
    b_rows = b.shape[0]
    if b_rows == 0:
        b = b.new_zeros((1, k))  # the kernel reads row 0 for a column out of range
    width = max_vec_width(k, b, y)
    vec_width = width if width * b.element_size() == 16 else 1
    lanes = lanes_of(k, vec_width)
    program = matrix_source(values.dtype, offsets.dtype, vec_width, lanes, config)
    tiles, slices = -(-(rows + nonzeros) // config.tile(lanes)), -(-k // (lanes * vec_width))
    first_rows = torch.empty(tiles + 1, dtype=torch.int64, device=b.device)
    heads, tails = torch.empty((2, tiles, k), dtype=accumulator(b.dtype), device=b.device)
    program["spmm_merge"](
        tiles * slices,
        config.threads,
        *(values, columns, offsets, b, y, first_rows, heads, tails),
        *(rows, nonzeros, b_rows, k, slices),
    )
    if tiles > 1:
        slices = -(-k // 32)
        blocks = -(-tiles // (config.threads // 32)) * slices
        arguments = (offsets, y, first_rows, heads, tails, tiles, k, slices)
        program["spmm_carry"](blocks, config.threads, *arguments)
    return y


SPMV = Implementation(
    operator="spmv",
    backend="cuda",
    forward=spmv,
    backward=transpose_cuda.backward_by(spmv),
    aot_kernels=(
        *(
            source(dtype, offsets, width)
            for dtype in DTYPES
            for offsets, width in ((torch.int32, VEC_WIDTH), (torch.int64, VEC_WIDTH), (torch.int32, 1))
        ),
        *(transpose_cuda.source(dtype) for dtype in DTYPES),
        transpose_cuda.source(torch.float32, torch.int64),
    ),
    idea="equal tiles of nonzeros, lanes a row by each tile's rows, carries added in a fixed order",
)
SPMM = Implementation(
    operator="spmm",
    backend="cuda",
    forward=spmm,
    backward=transpose_cuda.backward_by(spmm),
    aot_kernels=(
        *(
            matrix_source(dtype, torch.int32, width, lanes_of(64, width))
            for dtype in DTYPES
            for width in (16 // dtype.itemsize, 1)
        ),
        *(transpose_cuda.source(dtype, lanes=32) for dtype in DTYPES),
    ),
    idea="merge path: groups of lanes read rows of b in 16-byte pieces, carries added in a fixed order",
)
