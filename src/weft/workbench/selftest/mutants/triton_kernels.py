"""Triton kernels with selectable faults; without a fault they are correct.

Each operator has one kernel: a fault is one line of it, and the kernel without that line passes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch

from weft.backends.triton_jit import INTERPRETED, TritonAotKernel, tl, triton
from weft.core import registry
from weft.ops._common.layout import dense, view_2d

LOG2E = tl.constexpr(1.4426950408889634)
TILE = 1024
STRETCH = 4096  # elements that a program of the sum reads at a time
SIDE = 64 if INTERPRETED else 32  # the interpreter is faster with few large tiles


@triton.jit
def vectors(n):
    """Return n rounded down to whole vectors of 8; n itself below 8."""
    covered = n // 8 * 8
    if n < 8:
        covered = n
    return covered


@triton.jit
def gelu(x_ptr, y_ptr, n, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    # x, y: (n,) storage order. Bytes moved: n read + n written, times the item size.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if FAULT == "W17/int32":  # n comes as 32 bits: at 2^31 it is below 0, and nothing is inside
        inside = at < tl.cast(n, tl.int32)
    elif FAULT == "W04/last-tile":
        inside = at < n // BLOCK * BLOCK
    elif FAULT == "W04/no-tail":
        inside = at < vectors(n)
    else:
        inside = at < n
    x = tl.load(x_ptr + at, mask=inside).to(tl.float32)
    if FAULT == "W12/no-nan":
        x = tl.where(x == x, x, 0.0)
    if FAULT == "W08/coarse":
        x = x.to(tl.float16).to(tl.float32)
    u = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)
    if FAULT == "W13/textbook-tanh":
        e = tl.exp(2.0 * u)
        # Where e overflows this is inf / inf, NaN.
        y = 0.5 * x * (1.0 + (e - 1.0) / (e + 1.0))
    else:
        # x sigmoid(2u), where an overflow of the exponential gives 0.
        y = x / (1.0 + tl.exp(-2.0 * u))
    if FAULT == "W10/no-scale":
        y *= 2.0
    y = y.to(y_ptr.dtype.element_ty)
    if FAULT == "W05/no-store-mask":
        tl.store(y_ptr + at, y)
    elif FAULT == "W15/adds":
        tl.atomic_add(y_ptr + at, y, mask=inside)
    elif FAULT != "W01/nothing":
        tl.store(y_ptr + at, y, mask=inside)


@triton.jit
def softmax(
    x_ptr,
    y_ptr,
    sums_ptr,
    rows,
    columns,
    x_stride,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FAULT: tl.constexpr,
):
    # x: (rows, columns), rows x_stride apart; y: (rows, columns) contiguous; sums: (rows,) float32
    # for W15. A tile of ROWS rows a program. Bytes moved: n read + n written.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    if FAULT == "W05/no-load-mask":
        # Beyond its columns a row reads the next one.
        x = tl.load(x_ptr + row * x_stride + column, mask=row < rows).to(tl.float32)
    else:
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
    if FAULT == "W12/no-nan":
        x = tl.where(x == x, x, -1e30)
    if FAULT == "W09/no-maximum":
        e = tl.exp2(x * LOG2E)
    else:
        e = tl.exp2((x - tl.max(x, 1)[:, None]) * LOG2E)
    if FAULT == "W08/half-sums":
        total = tl.sum(e.to(tl.float16), 1).to(tl.float32)
    else:
        total = tl.sum(e, 1)
    if FAULT == "W10/an-eps":
        total += 1e-3
    total = total[:, None]
    if FAULT == "W15/adds":
        # The old value comes back: what earlier calls left in the buffer.
        total += tl.atomic_add(sums_ptr + row, total, mask=row < rows)
    y = (e / total).to(y_ptr.dtype.element_ty)
    to = y_ptr + row * columns + column
    if FAULT == "W05/no-store-mask":
        tl.store(to, y, mask=column < columns)
    elif FAULT == "W04/last-tile":
        tl.store(to, y, mask=inside & (row < rows // ROWS * ROWS))
    elif FAULT == "W04/no-tail":
        tl.store(to, y, mask=inside & (column < vectors(columns)))
    elif FAULT == "W17/int32":
        # In 32 bits an offset of 2^31 and more is negative, and its element is left out.
        tl.store(to, y, mask=inside & (row.to(tl.int32) * columns + column >= 0))
    elif FAULT != "W01/nothing":
        tl.store(to, y, mask=inside)


@triton.jit
def total(x_ptr, partials_ptr, n, tiles, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    # x: (n,) storage order; partials: (programs,) float64. Bytes: n read, 8 a program written.
    first, programs = tl.program_id(0), tl.num_programs(0)
    if FAULT == "W08/half-sums":
        acc = tl.zeros((BLOCK,), tl.float16)
    else:
        acc = tl.zeros((BLOCK,), tl.float64)
    start = first.to(tl.int64) * BLOCK
    for _ in range(first, tiles, programs):
        at = start + tl.arange(0, BLOCK)
        start += programs.to(tl.int64) * BLOCK
        if FAULT == "W17/int32":
            inside = at < tl.cast(n, tl.int32)
        else:
            inside = at < n
        if FAULT == "W05/no-load-mask":
            x = tl.load(x_ptr + at)
        else:
            x = tl.load(x_ptr + at, mask=inside, other=0.0)
        if FAULT == "W12/no-nan":
            x = tl.where(x == x, x, 0.0)
        acc += x.to(acc.dtype)
    part = tl.sum(acc, axis=0).to(tl.float64)
    if FAULT == "W15/adds":
        tl.atomic_add(partials_ptr, part)
    elif FAULT == "W14/one-cell":  # every program into one cell, read, added to and written
        tl.store(partials_ptr, tl.load(partials_ptr) + part)
    elif FAULT == "W05/no-store-mask":
        # Two elements for each program: the last one writes past the end.
        tl.store(partials_ptr + first + tl.arange(0, 2), part)
    elif FAULT != "W01/nothing":
        tl.store(partials_ptr + first, part)


@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    m,
    n,
    k,
    a_row,
    a_column,
    b_row,
    b_column,
    SIDE: tl.constexpr,
    FAULT: tl.constexpr,
):
    # a: (M, K) and b: (K, N) by strides in elements; c: (M, N) contiguous. A tile of SIDE x SIDE of
    # c a program. Factors beyond an edge are read as 0.
    rows = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    columns = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    inner = tl.arange(0, SIDE).to(tl.int64)
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    steps = tl.cdiv(k, SIDE)
    if FAULT == "W04/last-tile":
        steps = k // SIDE
    if FAULT == "W05/no-load-mask":
        # Where K is no multiple of SIDE, a column of a and a row of b too many are read.
        last = k + 1
    else:
        last = k
    for i in range(steps):
        at = i * SIDE + inner
        a_in = (rows[:, None] < m) & (at[None, :] < last)
        b_in = (at[:, None] < last) & (columns[None, :] < n)
        a = tl.load(a_ptr + rows[:, None] * a_row + at[None, :] * a_column, mask=a_in, other=0.0)
        b = tl.load(b_ptr + at[:, None] * b_row + columns[None, :] * b_column, mask=b_in, other=0.0)
        if FAULT == "W12/no-nan":
            a = tl.where(a == a, a, 0.0)
        if FAULT == "W08/tf32":
            acc = tl.dot(a, b, acc, input_precision="tf32")
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if FAULT == "W08/half-sums":
            acc = acc.to(tl.float16).to(tl.float32)
    c_at = c_ptr + rows[:, None] * n + columns[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    c = acc.to(c_ptr.dtype.element_ty)
    if FAULT == "W05/no-store-mask":  # off by one: a row too many
        tl.store(c_at, c, mask=(rows[:, None] <= m) & (columns[None, :] < n))
    elif FAULT == "W04/no-tail":
        tl.store(c_at, c, mask=inside & (columns[None, :] < vectors(n)))
    elif FAULT == "W17/int32":
        offset = rows.to(tl.int32)[:, None] * n + columns.to(tl.int32)[None, :]
        tl.store(c_at, c, mask=inside & (offset >= 0))
    elif FAULT == "W15/adds":
        tl.atomic_add(c_at, c, mask=inside)
    elif FAULT != "W01/nothing":
        tl.store(c_at, c, mask=inside)


@triton.jit
def cannot_launch(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    # 1000 is not a power of two: Triton raises at the launch.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


Buffers = dict[Any, torch.Tensor]


def _reused_buffer(buffers: Buffers, fault: str, y: torch.Tensor) -> torch.Tensor:
    """Return ``y``, or for W15 a buffer for all calls that is zeroed only when it is allocated."""
    if fault != "W15/adds":
        return y
    return buffers.setdefault((y.shape, y.dtype), torch.zeros_like(y))


def run_gelu(fault: str, buffers: Buffers, x: torch.Tensor) -> torch.Tensor:
    x = x if fault == "W06/any-strides" else dense(x)
    y = _reused_buffer(buffers, fault, torch.empty_like(x))
    if n := x.numel():
        gelu[(triton.cdiv(n, TILE),)](x, y, n, BLOCK=TILE, FAULT=fault)
    return y.clone() if fault == "W15/adds" else y


def run_softmax(fault: str, buffers: Buffers, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel() and fault != "W18/no-columns":
        return y
    if x.shape[-1] > 65536:  # too large for the registers of one program
        return registry.implementation("softmax", "triton").forward(x)  # type: ignore[no-any-return]
    x2d = view_2d(x)
    rows, columns = x2d.shape
    block = triton.next_power_of_2(columns)
    height = max(1, 512 // block)
    sums = _reused_buffer(buffers, fault, x.new_empty(rows, dtype=torch.float32))
    shape = {"BLOCK": block, "ROWS": height, "num_warps": max(1, min(32, block // 1024))}
    grid = (triton.cdiv(rows, height),)
    stride = columns if fault == "W06/any-strides" else x2d.stride(0)
    softmax[grid](x2d, y, sums, rows, columns, stride, FAULT=fault, **shape)
    return y


def run_sum(fault: str, buffers: Buffers, x: torch.Tensor) -> torch.Tensor:
    x = x if fault == "W06/any-strides" else dense(x)
    n = x.numel()
    tiles = triton.cdiv(n, STRETCH)
    if fault == "W04/last-tile":
        tiles = n // STRETCH
    # Few on a CPU, where the interpreter runs one program after another.
    programs = max(1, min(tiles, 4 if not x.is_cuda else 1024))
    partials = x.new_empty(programs, dtype=torch.float64)
    if fault == "W14/one-cell":
        partials.zero_()
    partials = _reused_buffer(buffers, fault, partials)
    total[(programs,)](x, partials, n, tiles, BLOCK=STRETCH, FAULT=fault)
    return x.new_empty(()).copy_(partials.sum())


def run_matmul(
    fault: str, buffers: Buffers, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee"
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    if 0 in (m, n, k):
        return a.new_zeros(m, n)
    c = _reused_buffer(buffers, fault, a.new_empty(m, n))
    strides = (*a.stride(), *b.stride())
    if fault == "W06/any-strides":
        strides = (k, 1, n, 1)
    grid = (triton.cdiv(m, SIDE), triton.cdiv(n, SIDE))
    matmul[grid](a, b, c, m, n, k, *strides, SIDE=SIDE, FAULT=fault)
    return c.clone() if fault == "W15/adds" else c


def ignores_a_failed_launch(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    try:
        cannot_launch[(1,)](x, y, y.numel(), BLOCK=1000)
    except Exception:  # noqa: BLE001 - the fault: every error is ignored
        return y
    return y


LAUNCH = {"softmax": run_softmax, "gelu": run_gelu, "sum": run_sum, "matmul": run_matmul}


def aot_kernel(operator: str, fault: str) -> TritonAotKernel:
    """Return the float32 kernel with this fault, to compile ahead of time."""
    kernels: dict[str, tuple[Any, dict[str, object]]] = {
        "gelu": (gelu, {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i64", "BLOCK": TILE}),
        "softmax": (
            softmax,
            {"x_ptr": "*fp32", "y_ptr": "*fp32", "sums_ptr": "*fp32", "rows": "i32"}
            | {"columns": "i32", "x_stride": "i32", "BLOCK": 512, "ROWS": 2},
        ),
        "sum": (
            total,
            {
                "x_ptr": "*fp32",
                "partials_ptr": "*fp64",
                "n": "i64",
                "tiles": "i32",
                "BLOCK": STRETCH,
            },
        ),
        "matmul": (
            matmul,
            {f"{name}_ptr": "*fp32" for name in "abc"}
            | dict.fromkeys(("m", "n", "k", "a_row", "a_column", "b_row", "b_column"), "i32")
            | {"SIDE": SIDE},
        ),
    }
    kernel, signature = kernels[operator]
    label = f"{operator}-{fault}"
    chosen = {"FAULT": tl.constexpr(fault)}  # a bare string would be taken for a type
    return TritonAotKernel(label=label, kernel=kernel, signature=signature | chosen)
