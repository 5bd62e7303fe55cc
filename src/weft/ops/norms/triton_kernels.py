"""Triton kernels of the norms: y = (x - mean) rstd weight + bias, or x rstd weight, along rows.

x: (rows, columns), rows x_stride apart; weight, bias: (columns,). CENTRED is layer norm; RMS norm has no
mean and no bias. RESIDUAL adds a second tensor r: the kernel normalises s = x + r, rounded to its dtype, and
writes s too. In a backward it may be SHARED: x and r get one gradient, and dr is not written. All arithmetic
is in float32.

The rounding error of a mean in float32 is the same for a whole row. The mean of x - mean is that error;
subtracting it as well (Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983) keeps
the digits of a row far from zero.
"""

from __future__ import annotations

from weft.backends.triton_jit import tl, triton
from weft.ops._common.philox_dropout_triton import keep_mask_by_eights, keep_mask_per_element

SHARED = tl.constexpr(2)  # a value of RESIDUAL


@triton.jit
def _statistics(x, mask, columns, eps, CENTRED: tl.constexpr):
    # Returns (x - mean, 1 / deviation, mean) of a float32 tile, which is zero where masked.
    if CENTRED:
        # Masked elements are 0 here and count nothing; in `diff` they must be cleared again.
        mean = tl.sum(x, 1) / columns
        diff = tl.where(mask, x - mean[:, None], 0.0)
        correction = tl.sum(diff, 1) / columns  # the rounding error of `mean`
        variance = _not_below_zero(tl.sum(diff * diff, 1) / columns - correction * correction)
        return diff - correction[:, None], _inverse_root(variance + eps), mean + correction
    else:
        mean_square = tl.sum(x * x, 1) / columns
        return x, _inverse_root(mean_square + eps), mean_square


@triton.jit
def _not_below_zero(v):
    return tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _inverse_root(v):
    # Correctly rounded: rsqrt's error of two units in the last place would scale the whole row.
    return tl.div_rn(1.0, tl.sqrt_rn(v))


# `rows` is only compared with the row's number: no program is compiled apart for some numbers of rows.
@triton.jit(do_not_specialize=["rows"])
def norm_tile(
    x_ptr,
    r_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    s_ptr,
    rows,
    columns,
    x_stride,
    r_stride,
    eps,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    # y, s: (rows, columns) contiguous. ROWS whole rows a program. Bytes: n read, n written (RESIDUAL:
    # 2n and 2n). ".cg" keeps x and r out of L1, so that the weights stay there.
    # int64: rows * x_stride may exceed 2^31.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0, cache_modifier=".cg")
    x = x.to(tl.float32)
    if RESIDUAL:
        r = tl.load(r_ptr + row * r_stride + column, mask=mask, other=0, cache_modifier=".cg")
        s = (x + r.to(tl.float32)).to(y_ptr.dtype.element_ty)
        tl.store(s_ptr + row * columns + column, s, mask=mask)
        x = s.to(tl.float32)
    diff, rstd, _mean = _statistics(x, mask, columns, eps, CENTRED)
    w = tl.load(w_ptr + column, mask=column < columns, other=0).to(tl.float32)
    y = diff * rstd[:, None] * w
    if CENTRED:
        y += tl.load(b_ptr + column, mask=column < columns, other=0).to(tl.float32)
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _multi_pass_statistics(x_ptr, columns, eps, BLOCK: tl.constexpr, CENTRED: tl.constexpr):
    # Returns (mean, 1 / deviation) of a row longer than BLOCK, merged block by block (Chan et al.).
    lane = tl.arange(0, BLOCK)
    mean = 0.0
    squares = 0.0
    for start in range(0, columns, BLOCK):
        mask = start + lane < columns
        x = tl.load(x_ptr + start + lane, mask=mask, other=0, eviction_policy="evict_last")
        x = x.to(tl.float32)
        if CENTRED:
            # Merge this block's mean and sum of squares into those of the `start` columns before it.
            # The last block may be short: its mean is over the columns that exist.
            count = tl.minimum(columns - start, BLOCK).to(tl.float32)
            block_mean = tl.sum(x, 0) / count
            diff = tl.where(mask, x - block_mean, 0.0)
            correction = tl.sum(diff, 0) / count
            step = block_mean - mean + correction
            squares += tl.sum(diff * diff, 0) - correction * correction * count
            squares += step * step * (count * start / (start + count))
            # Weighted by the share of columns seen so far; the first block has a share of 1.
            mean += step * (count / (start + count))
        else:
            squares += tl.sum(x * x, 0)
    return mean, _inverse_root(_not_below_zero(squares) / columns + eps)


@triton.jit
def norm_multi_pass(
    x_ptr,
    r_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    s_ptr,
    columns,
    x_stride,
    r_stride,
    eps,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    # One program for each row longer than BLOCK: read twice, the second time from L2 where it fits.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * columns
    lane = tl.arange(0, BLOCK)
    if RESIDUAL:
        s_ptr += row * columns
        for start in range(0, columns, BLOCK):
            mask = start + lane < columns
            x = tl.load(x_ptr + start + lane, mask=mask).to(tl.float32)
            r = tl.load(r_ptr + row * r_stride + start + lane, mask=mask).to(tl.float32)
            tl.store(s_ptr + start + lane, (x + r).to(y_ptr.dtype.element_ty), mask=mask)
        tl.debug_barrier()  # threads read below what other threads wrote
        x_ptr = s_ptr
    mean, rstd = _multi_pass_statistics(x_ptr, columns, eps, BLOCK, CENTRED)
    for start in range(0, columns, BLOCK):
        mask = start + lane < columns
        x = tl.load(x_ptr + start + lane, mask=mask, eviction_policy="evict_first").to(tl.float32)
        w = tl.load(w_ptr + start + lane, mask=mask).to(tl.float32)
        y = (x - mean) * rstd * w
        if CENTRED:
            y += tl.load(b_ptr + start + lane, mask=mask).to(tl.float32)
        tl.store(y_ptr + start + lane, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_gradient(g, w, diff, rstd, columns, CENTRED: tl.constexpr):
    # Returns (dx, xhat) of a float32 tile: dx = rstd (gw - mean gw - xhat mean(gw xhat)).
    xhat = diff * rstd[:, None]
    gw = g * w
    dx = gw - xhat * (tl.sum(gw * xhat, 1) / columns)[:, None]
    if CENTRED:
        dx -= (tl.sum(gw, 1) / columns)[:, None]
    return dx * rstd[:, None], xhat


@triton.jit(do_not_specialize=["rows"])
def norm_backward_persistent(
    g_ptr,
    grad_s_ptr,
    x_ptr,
    w_ptr,
    dx_ptr,
    dr_ptr,
    partials_ptr,
    rows,
    columns,
    g_stride,
    grad_s_stride,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    CENTRED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    # Persistent: each program loops over tiles of ROWS rows, the loads of the next tiles in flight, and
    # keeps its sums in registers. g, x and (RESIDUAL) grad_s, the gradient of s: (rows, columns); dx, dr:
    # contiguous; partials: (2 or 1, programs, columns) float32, the program's sums of g xhat and of g.
    # Bytes: 2n read, n written.
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(w_ptr + column, mask=column < columns, other=0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    # The grid fixes the order of a program's rows: the same device gives the same bits.
    step = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), step, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        mask = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + column, mask=mask, other=0).to(tl.float32)
        diff, rstd, _mean = _statistics(x, mask, columns, eps, CENTRED)
        dx, xhat = _row_gradient(g, w, diff, rstd, columns, CENTRED)
        if RESIDUAL:
            grad_s = tl.load(grad_s_ptr + row * grad_s_stride + column, mask=mask, other=0)
            dx += grad_s.to(tl.float32)
            if RESIDUAL != SHARED:
                tl.store(dr_ptr + row * columns + column, dx.to(dr_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        # Rows past the end have g = 0, but xhat is NaN there if eps is 0.
        dw += tl.sum(tl.where(row < rows, g * xhat, 0.0), 0)
        if CENTRED:
            db += tl.sum(g, 0)
    flat = tl.arange(0, BLOCK)
    at = partials_ptr + tl.program_id(0).to(tl.int64) * columns + flat
    tl.store(at, dw, mask=flat < columns)
    if CENTRED:
        tl.store(at + step.to(tl.int64) * columns, db, mask=flat < columns)


@triton.jit
def norm_backward_row(
    g_ptr,
    grad_s_ptr,
    x_ptr,
    w_ptr,
    dx_ptr,
    dr_ptr,
    statistics_ptr,
    columns,
    g_stride,
    grad_s_stride,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    # One program for each row, too long to keep column sums beside it. Writes dx, and statistics: (rows, 2),
    # the row's mean and 1 / deviation for norm_weight_partials.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0).to(tl.float32)
    g = tl.load(g_ptr + row * g_stride + column, mask=mask, other=0).to(tl.float32)
    w = tl.load(w_ptr + column, mask=mask, other=0).to(tl.float32)
    diff, rstd, mean = _statistics(x, mask, columns, eps, CENTRED)
    dx, _hat = _row_gradient(g, w, diff, rstd, columns, CENTRED)
    if RESIDUAL:
        dx += tl.load(grad_s_ptr + row * grad_s_stride + column, mask=mask, other=0).to(tl.float32)
        if RESIDUAL != SHARED:
            tl.store(dr_ptr + row * columns + column, dx.to(dr_ptr.dtype.element_ty), mask=mask)
    tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if CENTRED:
        tl.store(statistics_ptr + 2 * row, tl.sum(mean, 0))
    tl.store(statistics_ptr + 2 * row + 1, tl.sum(rstd, 0))


@triton.jit
def norm_backward_multi_pass(
    g_ptr,
    grad_s_ptr,
    x_ptr,
    w_ptr,
    dx_ptr,
    dr_ptr,
    statistics_ptr,
    columns,
    g_stride,
    grad_s_stride,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    # As norm_backward_row, for rows longer than BLOCK: x is read three times, g twice.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    g_ptr += row * g_stride
    lane = tl.arange(0, BLOCK)
    mean, rstd = _multi_pass_statistics(x_ptr, columns, eps, BLOCK, CENTRED)
    tl.store(statistics_ptr + 2 * row, mean)
    tl.store(statistics_ptr + 2 * row + 1, rstd)
    sum_gw = tl.zeros((BLOCK,), tl.float32)
    sum_gw_xhat = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        mask = start + lane < columns
        x = tl.load(x_ptr + start + lane, mask=mask, other=0).to(tl.float32)
        g = tl.load(g_ptr + start + lane, mask=mask, other=0).to(tl.float32)
        gw = g * tl.load(w_ptr + start + lane, mask=mask, other=0).to(tl.float32)
        sum_gw += gw
        # Lanes add over the whole row and are reduced once at the end, instead of in every block.
        sum_gw_xhat += tl.where(mask, gw * ((x - mean) * rstd), 0.0)
    mean_gw_xhat = tl.sum(sum_gw_xhat, 0) / columns
    mean_gw = 0.0
    if CENTRED:
        mean_gw = tl.sum(sum_gw, 0) / columns
    for start in range(0, columns, BLOCK):
        mask = start + lane < columns
        at = row * columns + start + lane
        x = tl.load(x_ptr + start + lane, mask=mask, other=0).to(tl.float32)
        g = tl.load(g_ptr + start + lane, mask=mask, other=0).to(tl.float32)
        gw = g * tl.load(w_ptr + start + lane, mask=mask, other=0).to(tl.float32)
        dx = (gw - mean_gw - (x - mean) * rstd * mean_gw_xhat) * rstd
        if RESIDUAL:
            grad_s = tl.load(grad_s_ptr + row * grad_s_stride + start + lane, mask=mask)
            dx += grad_s.to(tl.float32)
            if RESIDUAL != SHARED:
                tl.store(dr_ptr + at, dx.to(dr_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_weight_partials(
    g_ptr,
    x_ptr,
    statistics_ptr,
    partials_ptr,
    rows,
    columns,
    g_stride,
    x_stride,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    # Program (c, p) of (column blocks, parts): sums g xhat and g over every parts-th tile of ROWS rows, into
    # partials: (2 or 1, parts, columns). Bytes: 2n read.
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = flat[None, :]
    step = tl.num_programs(1)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), step):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        mask = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + column, mask=mask, other=0).to(tl.float32)
        rstd = tl.load(statistics_ptr + 2 * row + 1, mask=row < rows, other=0)
        if CENTRED:
            x -= tl.load(statistics_ptr + 2 * row, mask=row < rows, other=0)
            db += g
        dw += g * (x * rstd)
    at = partials_ptr + tl.program_id(1).to(tl.int64) * columns + flat
    tl.store(at, tl.sum(dw, 0), mask=flat < columns)
    if CENTRED:
        tl.store(at + step.to(tl.int64) * columns, tl.sum(db, 0), mask=flat < columns)


@triton.jit
def norm_sum_partials(
    partials_ptr, dw_ptr, db_ptr, parts, columns, BLOCK: tl.constexpr, TILE_ROWS: tl.constexpr
):
    # Program (c, which): sums BLOCK columns of partials[which], (parts, columns), in a fixed order, so that
    # two runs give the same bits.
    which = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    partials_ptr += which.to(tl.int64) * parts * columns
    total = tl.zeros((TILE_ROWS, BLOCK), tl.float32)
    for start in range(0, parts, TILE_ROWS):
        row = (start + tl.arange(0, TILE_ROWS))[:, None]
        mask = (row < parts) & (column < columns)[None, :]
        total += tl.load(partials_ptr + row.to(tl.int64) * columns + column[None, :], mask=mask, other=0)
    sums = tl.sum(total, 0)
    if which == 0:
        tl.store(dw_ptr + column, sums.to(dw_ptr.dtype.element_ty), mask=column < columns)
    else:
        tl.store(db_ptr + column, sums.to(db_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def _keep_mask(low, high, limit, row, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, EIGHT: tl.constexpr):
    # Mask of the elements that dropout keeps in a tile of ROWS rows (row: (ROWS, 1), int64) by BLOCK columns.
    # EIGHT: eight divides a row, so that eight neighbours share a block of random words; otherwise each
    # element computes its own block.
    if EIGHT:
        counter = row * (columns // 8) + tl.arange(0, BLOCK // 8)[None, :]
        return keep_mask_by_eights(low, high, limit, counter, (ROWS, BLOCK))
    return keep_mask_per_element(low, high, limit, row * columns + tl.arange(0, BLOCK)[None, :])


@triton.jit(do_not_specialize=["low", "high", "limit"])
def dropout_norm_tile(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, rows, columns, x_stride, r_stride, eps, low, high,
    limit, keep_scale, BLOCK: tl.constexpr, ROWS: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    # As norm_tile with CENTRED and RESIDUAL, and dropout of x. `keep_scale` is 1 / (1 - p); `limit` is the
    # threshold. Bytes: 2n read + 2n written.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0, cache_modifier=".cg")
    r = tl.load(r_ptr + row * r_stride + column, mask=mask, other=0, cache_modifier=".cg")
    keep = _keep_mask(low, high, limit, row, columns, ROWS, BLOCK, EIGHT)
    x = tl.where(keep, x.to(tl.float32) * keep_scale, 0.0) + r.to(tl.float32)
    s = x.to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + row * columns + column, s, mask=mask)
    diff, rstd, _mean = _statistics(s.to(tl.float32), mask, columns, eps, True)
    w = tl.load(w_ptr + column, mask=column < columns, other=0).to(tl.float32)
    b = tl.load(b_ptr + column, mask=column < columns, other=0).to(tl.float32)
    y = diff * rstd[:, None] * w + b
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["low", "high", "limit"])
def dropout_norm_backward(
    g_ptr, grad_s_ptr, s_ptr, w_ptr, dx_ptr, dr_ptr, partials_ptr, rows, columns, g_stride, grad_s_stride,
    eps, low, high, limit, keep_scale, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    EIGHT: tl.constexpr,
):  # fmt: skip
    # As norm_backward_persistent, where dx is dropout's gradient of dr; s is contiguous. Bytes: 3n read +
    # 2n written.
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(w_ptr + column, mask=column < columns, other=0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    step = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), step, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        mask = (row < rows) & (column < columns)
        s = tl.load(s_ptr + row * columns + column, mask=mask, other=0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + column, mask=mask, other=0).to(tl.float32)
        grad_s = tl.load(grad_s_ptr + row * grad_s_stride + column, mask=mask, other=0)
        diff, rstd, _mean = _statistics(s, mask, columns, eps, True)
        ds, xhat = _row_gradient(g, w, diff, rstd, columns, True)
        ds += grad_s.to(tl.float32)
        tl.store(dr_ptr + row * columns + column, ds.to(dr_ptr.dtype.element_ty), mask=mask)
        keep = _keep_mask(low, high, limit, row, columns, ROWS, BLOCK, EIGHT)
        dx = tl.where(keep, ds * keep_scale, 0.0)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += tl.sum(tl.where(row < rows, g * xhat, 0.0), 0)
        db += tl.sum(g, 0)
    flat = tl.arange(0, BLOCK)
    at = partials_ptr + tl.program_id(0).to(tl.int64) * columns + flat
    tl.store(at, dw, mask=flat < columns)
    tl.store(at + step.to(tl.int64) * columns, db, mask=flat < columns)
