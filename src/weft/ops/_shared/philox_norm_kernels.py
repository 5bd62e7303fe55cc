"""Triton kernels of dropout + residual + layer norm: the norms' kernels, x dropped on the way.

Where EIGHT divides a row, a block of random words is made once for eight neighbours; else for each.
"""

from __future__ import annotations

from weft.backends.triton_jit import tl, triton
from weft.ops._shared.norm_kernels import _gradient, _statistics
from weft.ops._shared.philox_dropout_triton import kept_of_each, kept_of_eight


@triton.jit
def _kept(
    low, high, limit, row, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, EIGHT: tl.constexpr
):
    # Of a tile of ROWS rows (row: (ROWS, 1), int64) by BLOCK columns.
    if EIGHT:
        counter = row * (columns // 8) + tl.arange(0, BLOCK // 8)[None, :]
        return kept_of_eight(low, high, limit, counter, (ROWS, BLOCK))
    return kept_of_each(low, high, limit, row * columns + tl.arange(0, BLOCK)[None, :])


@triton.jit(do_not_specialize=["low", "high", "limit"])
def dropout_norm_tile(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, rows, columns, x_stride, r_stride, eps, low, high,
    limit, keep, BLOCK: tl.constexpr, ROWS: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    # x, r: (rows, columns), rows a stride apart; w, b: (columns,); y, s: contiguous. ROWS whole
    # rows a program; `keep` is 1 / (1 - p). Bytes moved: 2n read + 2n written.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0, cache_modifier=".cg")
    r = tl.load(r_ptr + row * r_stride + column, mask=inside, other=0, cache_modifier=".cg")
    kept = _kept(low, high, limit, row, columns, ROWS, BLOCK, EIGHT)
    x = tl.where(kept, x.to(tl.float32) * keep, 0.0) + r.to(tl.float32)
    s = x.to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + row * columns + column, s, mask=inside)
    left, scale, _mean = _statistics(s.to(tl.float32), inside, columns, eps, True)
    w = tl.load(w_ptr + column, mask=column < columns, other=0).to(tl.float32)
    b = tl.load(b_ptr + column, mask=column < columns, other=0).to(tl.float32)
    y = left * scale[:, None] * w + b
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["low", "high", "limit"])
def dropout_norm_backward(
    g_ptr, more_ptr, s_ptr, w_ptr, dx_ptr, dr_ptr, part_ptr, rows, columns, g_stride, more_stride,
    eps, low, high, limit, keep, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    EIGHT: tl.constexpr,
):  # fmt: skip
    # g and more, the gradients of y and s: (rows, columns), rows a stride apart; s, dx, dr:
    # contiguous; part: (2, programs, columns) float32, this program's sums of g xhat and of g.
    # Programs stay, the next tiles' loads under way. Bytes moved: 3n read + 2n written.
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(w_ptr + column, mask=column < columns, other=0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    step = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), step, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (row < rows) & (column < columns)
        s = tl.load(s_ptr + row * columns + column, mask=inside, other=0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + column, mask=inside, other=0).to(tl.float32)
        more = tl.load(more_ptr + row * more_stride + column, mask=inside, other=0)
        left, scale, _mean = _statistics(s, inside, columns, eps, True)
        ds, hat = _gradient(g, w, left, scale, columns, True)
        ds += more.to(tl.float32)
        tl.store(dr_ptr + row * columns + column, ds.to(dr_ptr.dtype.element_ty), mask=inside)
        kept = _kept(low, high, limit, row, columns, ROWS, BLOCK, EIGHT)
        dx = tl.where(kept, ds * keep, 0.0)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dw += tl.sum(tl.where(row < rows, g * hat, 0.0), 0)
        db += tl.sum(g, 0)
    flat = tl.arange(0, BLOCK)
    at = part_ptr + tl.program_id(0).to(tl.int64) * columns + flat
    tl.store(at, dw, mask=flat < columns)
    tl.store(at + step.to(tl.int64) * columns, db, mask=flat < columns)
