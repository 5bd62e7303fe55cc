"""Triton kernels of the norms along rows: y = (x - mean) rstd weight + bias, or x rstd weight.

x: (rows, columns), rows x_stride apart; weight, bias: (columns,). CENTRED is layer norm; without
it there is no mean and no bias. ADD takes a second tensor r: what is normalised is s = x + r as
rounded to its dtype, which is an output too. All arithmetic is in float32.

A mean that float32 has rounded is off by the same amount for a whole row; the sum of what is left
after taking it away tells by how much (Chan, Golub and LeVeque, "Algorithms for computing the
sample variance", 1983), so that a row far from zero keeps its digits.
"""

from __future__ import annotations

from weft.backends.triton_jit import tl, triton


@triton.jit
def _statistics(x, inside, columns, eps, CENTRED: tl.constexpr):
    # Of a float32 tile, zero where masked: what is left of x after its mean, 1 / deviation, mean.
    if CENTRED:
        mean = tl.sum(x, 1) / columns
        left = tl.where(inside, x - mean[:, None], 0.0)
        more = tl.sum(left, 1) / columns
        variance = _not_below_zero(tl.sum(left * left, 1) / columns - more * more)
        return left - more[:, None], _inverse_root(variance + eps), mean + more
    else:
        mean_square = tl.sum(x * x, 1) / columns
        return x, _inverse_root(mean_square + eps), mean_square


@triton.jit
def _not_below_zero(v):
    return tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _inverse_root(v):
    # Rounded right, once a row: rsqrt's two units in the last place would be a whole row's.
    return tl.div_rn(1.0, tl.sqrt_rn(v))


@triton.jit
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
    ADD: tl.constexpr,
):
    # y, s: (rows, columns) contiguous. ROWS whole rows a program. Bytes: n read, n written (ADD:
    # 2n and 2n); the weights come from L1, which x does not go through.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0, cache_modifier=".cg")
    x = x.to(tl.float32)
    if ADD:
        r = tl.load(r_ptr + row * r_stride + column, mask=inside, other=0, cache_modifier=".cg")
        s = (x + r.to(tl.float32)).to(y_ptr.dtype.element_ty)
        tl.store(s_ptr + row * columns + column, s, mask=inside)
        x = s.to(tl.float32)
    left, scale, _mean = _statistics(x, inside, columns, eps, CENTRED)
    w = tl.load(w_ptr + column, mask=column < columns, other=0).to(tl.float32)
    y = left * scale[:, None] * w
    if CENTRED:
        y += tl.load(b_ptr + column, mask=column < columns, other=0).to(tl.float32)
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _long_statistics(x_ptr, columns, eps, BLOCK: tl.constexpr, CENTRED: tl.constexpr):
    # Of a row longer than BLOCK: mean and 1 / deviation, block by block, merged as Chan et al. do.
    lane = tl.arange(0, BLOCK)
    mean = 0.0
    squares = 0.0
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        x = tl.load(x_ptr + start + lane, mask=inside, other=0, eviction_policy="evict_last")
        x = x.to(tl.float32)
        if CENTRED:
            count = tl.minimum(columns - start, BLOCK).to(tl.float32)
            here = tl.sum(x, 0) / count
            left = tl.where(inside, x - here, 0.0)
            more = tl.sum(left, 0) / count
            step = here - mean + more
            squares += tl.sum(left * left, 0) - more * more * count
            squares += step * step * (count * start / (start + count))
            mean += step * (count / (start + count))
        else:
            squares += tl.sum(x * x, 0)
    return mean, _inverse_root(_not_below_zero(squares) / columns + eps)


@triton.jit
def norm_long(
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
    ADD: tl.constexpr,
):
    # One program a row, longer than BLOCK: read twice, the second time from L2 where it fits.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * columns
    lane = tl.arange(0, BLOCK)
    if ADD:
        s_ptr += row * columns
        for start in range(0, columns, BLOCK):
            inside = start + lane < columns
            x = tl.load(x_ptr + start + lane, mask=inside).to(tl.float32)
            r = tl.load(r_ptr + row * r_stride + start + lane, mask=inside).to(tl.float32)
            tl.store(s_ptr + start + lane, (x + r).to(y_ptr.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # a thread reads what another has written
        x_ptr = s_ptr
    mean, scale = _long_statistics(x_ptr, columns, eps, BLOCK, CENTRED)
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        x = tl.load(x_ptr + start + lane, mask=inside, eviction_policy="evict_first").to(tl.float32)
        w = tl.load(w_ptr + start + lane, mask=inside).to(tl.float32)
        y = (x - mean) * scale * w
        if CENTRED:
            y += tl.load(b_ptr + start + lane, mask=inside).to(tl.float32)
        tl.store(y_ptr + start + lane, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(g, w, left, scale, columns, CENTRED: tl.constexpr):
    # dx of a float32 tile, and the normalised rows: dx = rstd (gw - mean gw - xhat mean(gw xhat)).
    hat = left * scale[:, None]
    gw = g * w
    dx = gw - hat * (tl.sum(gw * hat, 1) / columns)[:, None]
    if CENTRED:
        dx -= (tl.sum(gw, 1) / columns)[:, None]
    return dx * scale[:, None], hat


@triton.jit
def norm_backward_stay(
    g_ptr,
    more_ptr,
    x_ptr,
    w_ptr,
    dx_ptr,
    dr_ptr,
    part_ptr,
    rows,
    columns,
    g_stride,
    more_stride,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    CENTRED: tl.constexpr,
    ADD: tl.constexpr,
):
    # g, x and (ADD) more, the gradient of s: (rows, columns); dx and dr: contiguous; part: (2 or 1,
    # programs, columns) float32, this program's sums of g xhat and of g. Programs stay and take
    # tile after tile of ROWS rows, the next tiles' loads under way. Bytes: 2n read, n written.
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(w_ptr + column, mask=column < columns, other=0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    step = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), step, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + column, mask=inside, other=0).to(tl.float32)
        left, scale, _mean = _statistics(x, inside, columns, eps, CENTRED)
        dx, hat = _gradient(g, w, left, scale, columns, CENTRED)
        if ADD:
            more = tl.load(more_ptr + row * more_stride + column, mask=inside, other=0)
            dx += more.to(tl.float32)
            tl.store(dr_ptr + row * columns + column, dx.to(dr_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dw += tl.sum(tl.where(row < rows, g * hat, 0.0), 0)
        if CENTRED:
            db += tl.sum(g, 0)
    flat = tl.arange(0, BLOCK)
    at = part_ptr + tl.program_id(0).to(tl.int64) * columns + flat
    tl.store(at, dw, mask=flat < columns)
    if CENTRED:
        tl.store(at + step.to(tl.int64) * columns, db, mask=flat < columns)


@triton.jit
def norm_backward_tile(
    g_ptr,
    more_ptr,
    x_ptr,
    w_ptr,
    dx_ptr,
    dr_ptr,
    held_ptr,
    columns,
    g_stride,
    more_stride,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    ADD: tl.constexpr,
):
    # One row a program, too long to keep sums beside it: dx, and held: (rows, 2), the row's mean
    # and 1 / deviation for norm_weight_parts.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    g = tl.load(g_ptr + row * g_stride + column, mask=inside, other=0).to(tl.float32)
    w = tl.load(w_ptr + column, mask=inside, other=0).to(tl.float32)
    left, scale, mean = _statistics(x, inside, columns, eps, CENTRED)
    dx, _hat = _gradient(g, w, left, scale, columns, CENTRED)
    if ADD:
        dx += tl.load(more_ptr + row * more_stride + column, mask=inside, other=0).to(tl.float32)
        tl.store(dr_ptr + row * columns + column, dx.to(dr_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if CENTRED:
        tl.store(held_ptr + 2 * row, tl.sum(mean, 0))
    tl.store(held_ptr + 2 * row + 1, tl.sum(scale, 0))


@triton.jit
def norm_backward_long(
    g_ptr,
    more_ptr,
    x_ptr,
    w_ptr,
    dx_ptr,
    dr_ptr,
    held_ptr,
    columns,
    g_stride,
    more_stride,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    ADD: tl.constexpr,
):
    # As norm_backward_tile for a row longer than BLOCK: x is read three times, g twice.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    g_ptr += row * g_stride
    lane = tl.arange(0, BLOCK)
    mean, scale = _long_statistics(x_ptr, columns, eps, BLOCK, CENTRED)
    tl.store(held_ptr + 2 * row, mean)
    tl.store(held_ptr + 2 * row + 1, scale)
    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        x = tl.load(x_ptr + start + lane, mask=inside, other=0).to(tl.float32)
        g = tl.load(g_ptr + start + lane, mask=inside, other=0).to(tl.float32)
        gw = g * tl.load(w_ptr + start + lane, mask=inside, other=0).to(tl.float32)
        first += gw
        second += tl.where(inside, gw * ((x - mean) * scale), 0.0)
    dot = tl.sum(second, 0) / columns
    average = 0.0
    if CENTRED:
        average = tl.sum(first, 0) / columns
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        at = row * columns + start + lane
        x = tl.load(x_ptr + start + lane, mask=inside, other=0).to(tl.float32)
        g = tl.load(g_ptr + start + lane, mask=inside, other=0).to(tl.float32)
        gw = g * tl.load(w_ptr + start + lane, mask=inside, other=0).to(tl.float32)
        dx = (gw - average - (x - mean) * scale * dot) * scale
        if ADD:
            more = tl.load(more_ptr + row * more_stride + start + lane, mask=inside)
            dx += more.to(tl.float32)
            tl.store(dr_ptr + at, dx.to(dr_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_weight_parts(
    g_ptr,
    x_ptr,
    held_ptr,
    part_ptr,
    rows,
    columns,
    g_stride,
    x_stride,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    # Program (c, p) of (column blocks, parts): the sums of g xhat and g over every parts-th tile of
    # ROWS rows, into part: (2 or 1, parts, columns). Bytes: 2n read.
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = flat[None, :]
    step = tl.num_programs(1)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), step):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + column, mask=inside, other=0).to(tl.float32)
        scale = tl.load(held_ptr + 2 * row + 1, mask=row < rows, other=0)
        if CENTRED:
            x -= tl.load(held_ptr + 2 * row, mask=row < rows, other=0)
            db += g
        dw += g * (x * scale)
    at = part_ptr + tl.program_id(1).to(tl.int64) * columns + flat
    tl.store(at, tl.sum(dw, 0), mask=flat < columns)
    if CENTRED:
        tl.store(at + step.to(tl.int64) * columns, tl.sum(db, 0), mask=flat < columns)


@triton.jit
def norm_sum_parts(
    part_ptr, dw_ptr, db_ptr, parts, columns, BLOCK: tl.constexpr, TALL: tl.constexpr
):
    # Program (c, which): BLOCK columns of part[which]: (parts, columns) added up in a fixed order.
    which = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part_ptr += which.to(tl.int64) * parts * columns
    total = tl.zeros((TALL, BLOCK), tl.float32)
    for start in range(0, parts, TALL):
        row = (start + tl.arange(0, TALL))[:, None]
        inside = (row < parts) & (column < columns)[None, :]
        total += tl.load(
            part_ptr + row.to(tl.int64) * columns + column[None, :], mask=inside, other=0
        )
    found = tl.sum(total, 0)
    if which == 0:
        tl.store(dw_ptr + column, found.to(dw_ptr.dtype.element_ty), mask=column < columns)
    else:
        tl.store(db_ptr + column, found.to(db_ptr.dtype.element_ty), mask=column < columns)
