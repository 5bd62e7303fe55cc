"""Sparse products in Triton: a program has a block of rows, and as many lanes for each as rows are long.

Rows of more than ``LONG`` rounds of their lanes are left to a second loop, in which the whole program walks
along one row. A program still has all nonzeros of its rows: one row of all columns takes as long as one
program takes to read it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import Implementation
from weft.ops.sparse.transpose import backward_by

TILE = 512  # nonzeros that a program loads at once
MAX_LANES = 64
LONG = 8
# spmm: rows and columns of b of a program, and the length from which a row has a whole program.
MATRIX_ROWS, MAX_WIDTH, LONG_MATRIX = 16, 64, 64


@triton.jit
def spmv_rows(
    values_ptr,
    columns_ptr,
    offsets_ptr,
    x_ptr,
    y_ptr,
    rows,
    nonzeros,
    x_size,
    LONG: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    ACC: tl.constexpr,
):
    # values, columns: (nonzeros,); offsets: (rows + 1,); x: (x_size,); y: (rows,); all contiguous.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    begin = tl.load(offsets_ptr + row, mask=is_row, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + row + 1, mask=is_row, other=0).to(tl.int64)
    # Whatever the offsets say, no access leaves the arrays.
    begin = tl.maximum(begin, 0)
    end = tl.minimum(end, nonzeros)
    is_long = end - begin > LONG * LANES
    short_end = tl.where(is_long, begin, end)
    rounds = tl.max((short_end - begin + LANES - 1) // LANES, 0)
    sums = tl.zeros((ROWS, LANES), ACC)
    at = begin[:, None] + tl.arange(0, LANES)[None, :]
    for _ in range(rounds):
        inside = at < short_end[:, None]
        column = tl.load(columns_ptr + at, mask=inside, other=0)
        value = tl.load(values_ptr + at, mask=inside, other=0.0).to(ACC)
        is_column = (column >= 0) & (column < x_size)
        # A column out of range is never used as an address: it makes the row NaN.
        x = tl.load(x_ptr + column, mask=inside & is_column, other=float("nan")).to(ACC)
        sums += tl.where(inside, value * x, 0.0)
        at += LANES
    y = tl.sum(sums, 1)
    if tl.max(is_long.to(tl.int32), 0) > 0:
        lane = tl.arange(0, ROWS * LANES)
        for i in range(ROWS):
            own = tl.arange(0, ROWS) == i
            if tl.max((own & is_long).to(tl.int32), 0) > 0:
                row_begin = tl.sum(tl.where(own, begin, 0), 0)
                row_end = tl.sum(tl.where(own, end, 0), 0)
                wide = tl.zeros((ROWS * LANES,), ACC)
                for start in range(row_begin, row_end, ROWS * LANES):
                    at_long = start + lane
                    here = at_long < row_end
                    wide_column = tl.load(columns_ptr + at_long, mask=here, other=0)
                    wide_value = tl.load(values_ptr + at_long, mask=here, other=0.0).to(ACC)
                    valid = (wide_column >= 0) & (wide_column < x_size)
                    wide_x = tl.load(x_ptr + wide_column, mask=here & valid, other=float("nan")).to(ACC)
                    wide += tl.where(here, wide_value * wide_x, 0.0)
                y = tl.where(own, tl.sum(wide, 0), y)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def spmm_rows(
    values_ptr,
    columns_ptr,
    offsets_ptr,
    b_ptr,
    y_ptr,
    rows,
    nonzeros,
    b_rows,
    k,
    LONG: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ACC: tl.constexpr,
):
    # As spmv_rows; b: (b_rows, k), y: (rows, k), contiguous. A program has ROWS rows and WIDTH columns of b.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at_b = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_row = row < rows
    is_b = at_b < k
    begin = tl.load(offsets_ptr + row, mask=is_row, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + row + 1, mask=is_row, other=0).to(tl.int64)
    begin = tl.maximum(begin, 0)
    end = tl.minimum(end, nonzeros)
    is_long = end - begin > LONG
    short_end = tl.where(is_long, begin, end)
    rounds = tl.max(short_end - begin, 0)
    y = tl.zeros((ROWS, WIDTH), ACC)
    at = begin
    for _ in range(rounds):
        inside = at < short_end
        column = tl.load(columns_ptr + at, mask=inside, other=0)
        value = tl.load(values_ptr + at, mask=inside, other=0.0).to(ACC)
        is_column = (column >= 0) & (column < b_rows)
        mask = (inside & is_column)[:, None] & is_b[None, :]
        piece = tl.load(
            b_ptr + column[:, None].to(tl.int64) * k + at_b[None, :], mask=mask, other=float("nan")
        )
        y += tl.where(inside[:, None], value[:, None] * piece.to(ACC), 0.0)
        at += 1
    if tl.max(is_long.to(tl.int32), 0) > 0:
        for i in range(ROWS):
            own = tl.arange(0, ROWS) == i
            if tl.max((own & is_long).to(tl.int32), 0) > 0:
                row_begin = tl.sum(tl.where(own, begin, 0), 0)
                row_end = tl.sum(tl.where(own, end, 0), 0)
                wide = tl.zeros((ROWS, WIDTH), ACC)
                for start in range(row_begin, row_end, ROWS):
                    at_long = start + tl.arange(0, ROWS)
                    here = at_long < row_end
                    wide_column = tl.load(columns_ptr + at_long, mask=here, other=0)
                    wide_value = tl.load(values_ptr + at_long, mask=here, other=0.0).to(ACC)
                    valid = (wide_column >= 0) & (wide_column < b_rows)
                    wide_mask = (here & valid)[:, None] & is_b[None, :]
                    wide_at = wide_column[:, None].to(tl.int64) * k + at_b[None, :]
                    wide_piece = tl.load(b_ptr + wide_at, mask=wide_mask, other=float("nan")).to(ACC)
                    wide += tl.where(here[:, None], wide_value[:, None] * wide_piece, 0.0)
                y = tl.where(own[:, None], tl.sum(wide, 0)[None, :], y)
    mask_y = is_row[:, None] & is_b[None, :]
    tl.store(y_ptr + row[:, None] * k + at_b[None, :], y.to(y_ptr.dtype.element_ty), mask=mask_y)


def lanes_of(rows: int, nonzeros: int) -> int:
    """Return the lanes of a row: the power of two from the mean length on, from 2 to ``MAX_LANES``."""
    return min(MAX_LANES, max(2, triton.next_power_of_2(-(-nonzeros // max(rows, 1)))))


def spmv(values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor, tile: int = TILE) -> Tensor:
    """Compute the product with programs that load ``tile`` nonzeros at once."""
    rows, nonzeros = offsets.shape[0] - 1, values.shape[0]
    y = x.new_empty(rows)
    if rows == 0:
        return y
    lanes = lanes_of(rows, nonzeros)
    block = max(1, tile // lanes)
    spmv_rows[(triton.cdiv(rows, block),)](
        *(t.contiguous() for t in (values, columns, offsets, x)),
        y,
        rows,
        nonzeros,
        x.shape[0],
        LONG=LONG,
        ROWS=block,
        LANES=lanes,
        ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
        num_warps=4,
    )
    return y


def spmm(values: Tensor, columns: Tensor, offsets: Tensor, b: Tensor) -> Tensor:
    """Compute the product with a dense matrix."""
    rows, k = offsets.shape[0] - 1, b.shape[1]
    y = b.new_empty((rows, k))
    if y.numel() == 0:
        return y
    width = min(MAX_WIDTH, max(4, triton.next_power_of_2(k)))
    spmm_rows[(triton.cdiv(rows, MATRIX_ROWS), triton.cdiv(k, width))](
        *(t.contiguous() for t in (values, columns, offsets, b)),
        y,
        rows,
        values.shape[0],
        b.shape[0],
        k,
        LONG=LONG_MATRIX,
        ROWS=MATRIX_ROWS,
        WIDTH=width,
        ACC=tl.float64 if b.dtype == torch.float64 else tl.float32,
        num_warps=4,
    )
    return y


def _aot_kernels(kernel: Any, factor: str, constants: dict[str, int]) -> tuple[TritonAotKernel, ...]:
    kernels = []
    for dtype in ("fp32", "bf16", "fp16", "fp64"):
        for offsets in ("i32", "i64"):
            signature: dict[str, Any] = {
                "values_ptr": f"*{dtype}",
                "columns_ptr": "*i32",
                "offsets_ptr": f"*{offsets}",
                f"{factor}_ptr": f"*{dtype}",
                "y_ptr": f"*{dtype}",
                **dict.fromkeys(("rows", "nonzeros"), "i64"),
                **({"x_size": "i64"} if factor == "x" else {"b_rows": "i64", "k": "i64:16"}),
                **constants,
                "ACC": tl.float64 if dtype == "fp64" else tl.float32,
            }
            label = f"{kernel.fn.__name__}-{dtype}-{offsets}"
            kernels.append(TritonAotKernel(label=label, kernel=kernel, signature=signature, num_warps=4))
    return tuple(kernels)


SPMV = Implementation(
    operator="spmv",
    backend="triton",
    forward=spmv,
    backward=backward_by(spmv),
    aot_kernels=_aot_kernels(spmv_rows, "x", {"LONG": LONG, "ROWS": TILE // 16, "LANES": 16}),
    idea="a block of rows a program, lanes by the mean length; long rows by the whole program",
)
SPMM = Implementation(
    operator="spmm",
    backend="triton",
    forward=spmm,
    backward=backward_by(spmm),
    aot_kernels=_aot_kernels(spmm_rows, "b", {"LONG": LONG_MATRIX, "ROWS": MATRIX_ROWS, "WIDTH": MAX_WIDTH}),
    idea="a block of rows a program, one nonzero of each at a time; long rows by the whole program",
)
