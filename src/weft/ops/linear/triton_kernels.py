"""Triton kernels of the linear family: x W^T with its epilogue.

The epilogue adds the bias to the float32 sums and then, by EPILOGUE, nothing, GELU (GELU_KEEP also stores the
pre-activation) or a residual. The result is rounded once. GELU in tanh form is v / (1 + exp(-2u)), which
keeps its digits where tanh approaches -1 (arXiv:1606.08415).
"""

from __future__ import annotations

from weft.backends.triton_jit import tl, triton
from weft.ops._common.gelu_triton import gelu
from weft.ops._common.tiles_triton import tile_position

BIAS, GELU, GELU_KEEP, RESIDUAL = (tl.constexpr(i) for i in range(4))


@triton.jit
def split_columns(acc, BM: tl.constexpr, BN: tl.constexpr):
    """Return the left and the right half of a (BM, BN) tile; this renames registers and moves no data."""
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def prefetch_bias(bias_ptr, column, n, BN: tl.constexpr):
    """Prefetch a tile's bias into L1, one instruction per 64 elements (128 bytes of a half type)."""
    columns = column + 64 * tl.arange(0, BN // 64)
    addresses = bias_ptr + tl.minimum(columns, n - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def epilogue_part(
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
    PRE_BY_POINTERS: tl.constexpr,
):
    # v: float32, bias included, the columns of a tile from (row, column) on. Descriptors read 0 beyond an
    # edge and write nothing there. Stores by descriptor share one staging tile in shared memory, and each
    # waits for the one before; with PRE_BY_POINTERS pre is a pointer and bypasses that tile.
    if EPILOGUE == RESIDUAL:
        v += residual_desc.load([row, column]).to(tl.float32)
    if EPILOGUE == GELU_KEEP:
        if PRE_BY_POINTERS:
            rows = row + tl.arange(0, v.shape[0])
            columns = column + tl.arange(0, v.shape[1])
            addresses = pre + rows.to(tl.int64)[:, None] * n + columns[None, :]
            inside = (rows[:, None] < m) & (columns[None, :] < n)
            tl.store(addresses, v.to(pre.dtype.element_ty), mask=inside)
        else:
            pre.store([row, column], v.to(pre.dtype))
    if EPILOGUE == GELU or EPILOGUE == GELU_KEEP:  # noqa: SIM109 - Triton constants
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
    PREFETCH_BIAS: tl.constexpr,
    PRE_BY_POINTERS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    MATH: tl.constexpr,
):
    # x: (M, K); weight: (N, K); bias: (N,); residual, y, pre: (M, N), described in blocks of BN / PARTS
    # columns. Persistent: a program takes tiles pid, pid + programs, ... The epilogue runs in PARTS, which
    # divides the shared memory that stages its stores. The bias is loaded for the whole tile at once, so that
    # its latency from L2 is paid once per tile; PREFETCH_BIAS prefetches it before the product.
    row_tiles = tl.cdiv(m, BM)
    column_tiles = tl.cdiv(n, BN)
    k_tiles = tl.cdiv(k, BK)
    first = tl.program_id(0)
    # A second counter beside the loop variable: when FLATTEN merges the two loops, the loads of the next tile
    # are issued before this tile is stored, so that loads and stores need a position each.
    stored = first - tl.num_programs(0)
    for tile in tl.range(first, row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile_position(tile, row_tiles, column_tiles, GROUP)
        if PREFETCH_BIAS:
            prefetch_bias(bias_ptr, column * BN, n, BN)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for i in range(k_tiles):
            x = x_desc.load([row * BM, i * BK])
            w = weight_desc.load([column * BN, i * BK]).T
            acc = tl.dot(x, w, acc, input_precision="ieee")
        stored += tl.num_programs(0)
        row, column = tile_position(stored, row_tiles, column_tiles, GROUP)
        row_start = row * BM
        column_start = column * BN
        columns = column_start + tl.arange(0, BN)
        bias = tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)
        v = acc + bias[None, :]
        if PARTS == 1:
            epilogue_part(
                v, residual_desc, y_desc, pre, row_start, column_start, m, n, EPILOGUE, MATH, PRE_BY_POINTERS
            )
        else:
            W: tl.constexpr = BN // PARTS
            left, right = split_columns(v, BM, BN)
            if PARTS == 2:
                quarters = (left, right)
            else:
                quarters = split_columns(left, BM, BN // 2) + split_columns(right, BM, BN // 2)
            for i in tl.static_range(PARTS):
                epilogue_part(
                    quarters[i],
                    residual_desc,
                    y_desc,
                    pre,
                    row_start,
                    column_start + i * W,
                    m,
                    n,
                    EPILOGUE,
                    MATH,
                    PRE_BY_POINTERS,
                )


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
    # x: (M, K), weight: (N, K), residual: (M, N) by any row and column strides, in elements; bias: (N,);
    # y, pre: (M, N) contiguous. One tile per program. Masked loads read 0 beyond an edge.
    row, column = tile_position(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    # 64 bits: row index times stride exceeds 2^31 in a large matrix.
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_row + inner.to(tl.int64)[None, :] * x_column
    w_ptrs = weight_ptr + columns.to(tl.int64)[None, :] * w_row + inner.to(tl.int64)[:, None] * w_column
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for i in range(tl.cdiv(k, BK)):
        k_left = k - i * BK
        x = tl.load(x_ptrs, mask=(rows[:, None] < m) & (inner[None, :] < k_left), other=0.0)
        w = tl.load(w_ptrs, mask=(inner[:, None] < k_left) & (columns[None, :] < n), other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        x_ptrs += BK * tl.cast(x_column, tl.int64)
        w_ptrs += BK * tl.cast(w_column, tl.int64)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    rows_64 = rows.to(tl.int64)[:, None]
    bias = tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)
    v = acc + bias[None, :]
    if EPILOGUE == RESIDUAL:
        residual_ptrs = residual_ptr + rows_64 * r_row + columns.to(tl.int64)[None, :] * r_column
        v += tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    offsets = rows_64 * n + columns[None, :]
    if EPILOGUE == GELU_KEEP:
        tl.store(pre_ptr + offsets, v.to(pre_ptr.dtype.element_ty), mask=inside)
    if EPILOGUE == GELU or EPILOGUE == GELU_KEEP:  # noqa: SIM109 - Triton constants
        v = gelu(v, MATH)
    tl.store(y_ptr + offsets, v.to(y_ptr.dtype.element_ty), mask=inside)
