"""Triton kernels of the linear operators: x W^T with its epilogue, and the pass of a backward.

A product's epilogue adds the bias and then, by EPILOGUE, nothing, GELU (whose argument may be kept)
or a residual, on the float32 sums: one rounding. GELU in tanh form is v / (1 + exp(-2u)), which
keeps its digits where tanh nears -1 (arXiv:1606.08415).
"""

from __future__ import annotations

from weft.backends.triton_jit import tl, triton

BIAS, GELU, GELU_KEEP, RESIDUAL = (tl.constexpr(i) for i in range(4))
# How the share of v that GELU lets pass is computed: exp and a division as Triton has them (what
# its interpreter knows); exp2 and a reciprocal by the special-function unit, 2 ulp each; PAIRED:
# one reciprocal for two, 3/4 of that unit's work; or one tanh.approx, half of it, with 2^-11 of
# error.
PLAIN, UNIT, TANH, PAIRED = (tl.constexpr(i) for i in range(4))
ROOT = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
CUBIC = tl.constexpr(0.044715)
EXPONENT = tl.constexpr(-2 * 0.7978845608028654 * 1.4426950408889634)  # exp(-2u) as a power of 2


@triton.jit
def share(v, SIGN: tl.constexpr, MATH: tl.constexpr):
    """sigmoid(2u) for float32 v, or of -2u where SIGN is -1: the share of v that GELU passes."""
    w = v * v
    exponent = v * (SIGN * EXPONENT + SIGN * EXPONENT * CUBIC * w)
    if MATH == UNIT:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            ex2.approx.ftz.f32 e, $1;
            add.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
            }""",
            "=f,f",
            [exponent],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    elif MATH == PAIRED:
        # 1/a and 1/b as b/(ab) and a/(ab): the product is held finite, and a share under 2^-63 is 0
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 a, b, r;
            .reg .pred p, q;
            setp.gt.f32 p, $2, 0f427C0000;
            setp.gt.f32 q, $3, 0f427C0000;
            min.f32 a, $2, 0f427C0000;
            min.f32 b, $3, 0f427C0000;
            ex2.approx.ftz.f32 a, a;
            ex2.approx.ftz.f32 b, b;
            add.f32 a, a, 0f3F800000;
            add.f32 b, b, 0f3F800000;
            mul.f32 r, a, b;
            rcp.approx.ftz.f32 r, r;
            mul.f32 b, r, b;
            mul.f32 a, r, a;
            selp.f32 $0, 0f00000000, b, p;
            selp.f32 $1, 0f00000000, a, q;
            }""",
            "=f,=f,f,f",
            [exponent],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return 1.0 / (1.0 + tl.exp2(exponent))


@triton.jit
def gelu(v, MATH: tl.constexpr):
    """GELU, tanh form, of float32 v."""
    if MATH == TANH:
        w = v * v
        u = v * (ROOT + ROOT * CUBIC * w)
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
        half = 0.5 * v
        return half * t + half
    else:
        return v * share(v, 1, MATH)


@triton.jit
def gelu_slope(v, MATH: tl.constexpr):
    """The derivative of GELU at float32 v: s + v s (1 - s) 2u', with s = sigmoid(2u)."""
    # v^2 is held finite so that 0 * inf makes no NaN of a slope that is plainly 0 or 1.
    inner = 2 * ROOT * (1.0 + 3 * CUBIC * tl.minimum(v * v, 1e30))
    # 1 - s loses its digits where s nears 1; there it is sigmoid(-2u), which has them all.
    if MATH == UNIT:
        # That is e s, with e = exp(-2u): no second turn of the special-function unit, which for
        # this pass is nearly as busy as memory is.
        exponent = v * (EXPONENT + EXPONENT * CUBIC * (v * v))
        s, rest = tl.inline_asm_elementwise(
            """{
            .reg .f32 e, t;
            .reg .pred p;
            setp.gt.f32 p, $2, 0f42FC0000;
            ex2.approx.ftz.f32 e, $2;
            add.f32 t, e, 0f3F800000;
            rcp.approx.ftz.f32 t, t;
            mul.f32 e, e, t;
            selp.f32 $0, 0f00000000, t, p;
            selp.f32 $1, 0f3F800000, e, p;
            }""",
            "=&f,=&f,f",
            [exponent],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        s = share(v, 1, MATH)
        rest = tl.where(s < 0.5, 1.0 - s, share(v, -1, MATH))
    return s + v * s * rest * inner


@triton.jit
def tile_place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row, column) of a tile, counted down bands of GROUP rows, each band column by column."""
    in_band = GROUP * column_tiles
    band = tile // in_band
    first = band * GROUP
    height = min(row_tiles - first, GROUP)
    within = tile % in_band
    return first + within % height, within // height


@triton.jit
def in_two(acc, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of a (BM, BN) tile: registers renamed, nothing moved."""
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def bring(bias_ptr, column, n, BN: tl.constexpr):
    """A tile's bias asked for into L1, 64 elements at a time."""
    columns = column + 64 * tl.arange(0, BN // 64)
    at = bias_ptr + tl.minimum(columns, n - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def finish(
    v,
    residual_desc,
    y_desc,
    pre,
    row,
    column,
    m,
    n,
    EPILOGUE: tl.constexpr,
    MATH: tl.constexpr,
    ASIDE: tl.constexpr,
):
    # v: float32, with its bias, columns of a tile from (row, column) on. What lies beyond an edge
    # is read as 0 and not written. ASIDE: pre goes by pointers, so that it and y need not wait for
    # the one staging tile that stores by descriptor share; else pre is a descriptor too.
    if EPILOGUE == RESIDUAL:
        v += residual_desc.load([row, column]).to(tl.float32)
    if EPILOGUE == GELU_KEEP:
        if ASIDE:
            rows = row + tl.arange(0, v.shape[0])
            columns = column + tl.arange(0, v.shape[1])
            to = pre + rows.to(tl.int64)[:, None] * n + columns[None, :]
            inside = (rows[:, None] < m) & (columns[None, :] < n)
            tl.store(to, v.to(pre.dtype.element_ty), mask=inside)
        else:
            pre.store([row, column], v.to(pre.dtype))
    if EPILOGUE == GELU or EPILOGUE == GELU_KEEP:  # noqa: SIM109 - constants of Triton
        v = gelu(v, MATH)
    y_desc.store([row, column], v.to(y_desc.dtype))


@triton.jit
def linear_descriptors(
    x_desc,
    weight_desc,
    bias_ptr,
    residual_desc,
    y_desc,
    pre,
    m,
    n,
    k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    FLATTEN: tl.constexpr,
    BRING: tl.constexpr,
    ASIDE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    MATH: tl.constexpr,
):
    # x: (M, K); weight: (N, K); bias: (N,); residual, y, pre: (M, N), rows in blocks of BN / PARTS
    # columns. A program takes tiles pid, pid + programs, ... The tile is finished in PARTS, whose
    # staging for the copy engine needs that much less shared memory. The bias is loaded
    # for all of the tile, so that its way from L2 is waited for once, not in every part; BRING
    # asks for it before the product.
    row_tiles = tl.cdiv(m, BM)
    column_tiles = tl.cdiv(n, BN)
    k_tiles = tl.cdiv(k, BK)
    first = tl.program_id(0)
    # Counted apart from the loop's own variable: when FLATTEN makes one loop of the two, the next
    # tile's loads are issued before this tile is stored, and each needs its own place.
    stored = first - tl.num_programs(0)
    for tile in tl.range(first, row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile_place(tile, row_tiles, column_tiles, GROUP)
        if BRING:
            bring(bias_ptr, column * BN, n, BN)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for i in range(k_tiles):
            x = x_desc.load([row * BM, i * BK])
            w = weight_desc.load([column * BN, i * BK]).T
            acc = tl.dot(x, w, acc, input_precision="ieee")
        stored += tl.num_programs(0)
        row, column = tile_place(stored, row_tiles, column_tiles, GROUP)
        down = row * BM
        at = column * BN
        columns = at + tl.arange(0, BN)
        bias = tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)
        v = acc + bias[None, :]
        if PARTS == 1:
            finish(v, residual_desc, y_desc, pre, down, at, m, n, EPILOGUE, MATH, ASIDE)
        else:
            W: tl.constexpr = BN // PARTS
            left, right = in_two(v, BM, BN)
            if PARTS == 2:
                finish(left, residual_desc, y_desc, pre, down, at, m, n, EPILOGUE, MATH, ASIDE)
                finish(right, residual_desc, y_desc, pre, down, at + W, m, n, EPILOGUE, MATH, ASIDE)
            else:
                a, b = in_two(left, BM, BN // 2)
                c, d = in_two(right, BM, BN // 2)
                finish(a, residual_desc, y_desc, pre, down, at, m, n, EPILOGUE, MATH, ASIDE)
                finish(b, residual_desc, y_desc, pre, down, at + W, m, n, EPILOGUE, MATH, ASIDE)
                finish(c, residual_desc, y_desc, pre, down, at + 2 * W, m, n, EPILOGUE, MATH, ASIDE)
                finish(d, residual_desc, y_desc, pre, down, at + 3 * W, m, n, EPILOGUE, MATH, ASIDE)


@triton.jit
def linear_pointers(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    pre_ptr,
    m,
    n,
    k,
    x_row,
    x_column,
    w_row,
    w_column,
    r_row,
    r_column,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EPILOGUE: tl.constexpr,
    MATH: tl.constexpr,
):
    # x: (M, K), weight: (N, K), residual: (M, N) by row and column strides in elements, whatever
    # they are; bias: (N,); y, pre: (M, N) contiguous. One tile a program. Beyond an edge: 0.
    row, column = tile_place(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    # 64 bits: a row's number times its stride passes 2^31 in a large matrix.
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_row + inner.to(tl.int64)[None, :] * x_column
    w_at = (
        weight_ptr + columns.to(tl.int64)[None, :] * w_row + inner.to(tl.int64)[:, None] * w_column
    )
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for i in range(tl.cdiv(k, BK)):
        left = k - i * BK
        x = tl.load(x_at, mask=(rows[:, None] < m) & (inner[None, :] < left), other=0.0)
        w = tl.load(w_at, mask=(inner[:, None] < left) & (columns[None, :] < n), other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        x_at += BK * tl.cast(x_column, tl.int64)
        w_at += BK * tl.cast(w_column, tl.int64)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    wide = rows.to(tl.int64)[:, None]
    bias = tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)
    v = acc + bias[None, :]
    if EPILOGUE == RESIDUAL:
        r_at = residual_ptr + wide * r_row + columns.to(tl.int64)[None, :] * r_column
        v += tl.load(r_at, mask=inside, other=0.0).to(tl.float32)
    at = wide * n + columns[None, :]
    if EPILOGUE == GELU_KEEP:
        tl.store(pre_ptr + at, v.to(pre_ptr.dtype.element_ty), mask=inside)
    if EPILOGUE == GELU or EPILOGUE == GELU_KEEP:  # noqa: SIM109 - constants of Triton
        v = gelu(v, MATH)
    tl.store(y_ptr + at, v.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def column_pass(
    grad_ptr,
    pre_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    m,
    n,
    rows_each,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SLOPE: tl.constexpr,
    COPY: tl.constexpr,
    MATH: tl.constexpr,
):
    # grad, pre, out: (M, N) contiguous; bias: (N,), added to pre, or None; partial: (chunks, N)
    # float32. A program sums COLUMNS columns over its chunk of rows_each rows, always in the same
    # order, and on the way writes out = grad (COPY) or grad * gelu'(pre) (SLOPE), which is what it
    # then sums. Every element read once, written once.
    chunk = tl.program_id(0) // tl.cdiv(n, COLUMNS)
    columns = tl.program_id(0) % tl.cdiv(n, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    first = chunk * rows_each
    last = tl.minimum(first + rows_each, m)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * n + columns[None, :]
        inside = (rows[:, None] < last) & (columns[None, :] < n)
        g = tl.load(grad_ptr + at, mask=inside, other=0.0)
        if SLOPE:
            pre = tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                pre += bias
            wide = g.to(tl.float32) * gelu_slope(pre, MATH)
            tl.store(out_ptr + at, wide.to(out_ptr.dtype.element_ty), mask=inside)
            total += wide
        else:
            if COPY:
                tl.store(out_ptr + at, g, mask=inside)
            total += g.to(tl.float32)
    sums = tl.sum(total, 0)
    tl.store(partial_ptr + chunk.to(tl.int64) * n + columns, sums, mask=columns < n)


@triton.jit
def column_total(partial_ptr, out_ptr, chunks, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # partial: (chunks, N) float32; out: (N,). COLUMNS columns a program, in a fixed order.
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, chunks, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows[:, None] < chunks) & (columns[None, :] < n)
        at = rows.to(tl.int64)[:, None] * n + columns[None, :]
        total += tl.load(partial_ptr + at, mask=inside, other=0.0)
    sums = tl.sum(total, 0)
    tl.store(out_ptr + columns, sums.to(out_ptr.dtype.element_ty), mask=columns < n)
