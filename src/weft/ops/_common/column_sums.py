"""Column sums in Triton: the pass of a linear backward that computes dbias, in a fixed order of rows.

One kernel writes partial sums of chunks of rows, a second small one adds them up. There are no atomics, so
that two runs give the same bits. On the way the first kernel can write the gradient times GELU's slope, or a
copy of the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from weft.backends.triton_jit import INTERPRETED, TritonAotKernel, tl, triton
from weft.machine.device_limits import num_sms
from weft.ops._common.gelu_triton import PLAIN, UNIT, gelu_slope

# The second kernel reads few rows: narrow tiles make enough programs.
TOTAL = {"ROWS": 512, "COLUMNS": 16, "num_warps": 8}


@dataclass(frozen=True, kw_only=True)
class ColumnConfig:
    """``rows x columns`` elements per step of a program, by ``warps`` warps.

    The grid aims at ``programs_per_sm``: the number that fits at once, which avoids a second wave, or
    several times that number, which makes the last wave a small share. ``stages`` above 1 loads that
    many tiles ahead through shared memory.
    """

    rows: int
    columns: int
    warps: int
    programs_per_sm: int
    stages: int = 1


# A pass that only reads profits from tiles loaded ahead: 97 us against 117 for 65536 x 3072 on an H200.
# A pass that writes prefers many programs, at 56 registers per thread, 96 with a slope: 302 us against 322.
SUM_ONLY = ColumnConfig(rows=16, columns=256, warps=4, programs_per_sm=4, stages=3)
COPY = ColumnConfig(rows=16, columns=256, warps=4, programs_per_sm=8)
SLOPE = ColumnConfig(rows=16, columns=256, warps=4, programs_per_sm=5)
# With a bias, which stays in registers, 16 rows take 125 registers per thread and 8 rows take 68. An H200 is
# still slower with 8 rows: results/nvidia-h200/sweep-embedding-bias_gelu-2026-11-22.ndjson.
SLOPE_BIAS = replace(SLOPE, programs_per_sm=4)
SLOPE_BIAS_CANDIDATES = (
    SLOPE_BIAS,
    replace(SLOPE_BIAS, rows=8, programs_per_sm=7),
    replace(SLOPE_BIAS, rows=8, programs_per_sm=28),
    replace(SLOPE_BIAS, rows=4, programs_per_sm=40),
    replace(SLOPE_BIAS, warps=8, programs_per_sm=12),
    replace(SLOPE_BIAS, programs_per_sm=16),
)
CANDIDATES = (
    SUM_ONLY,
    COPY,
    SLOPE,
    ColumnConfig(rows=16, columns=256, warps=4, programs_per_sm=4),
    ColumnConfig(rows=8, columns=256, warps=4, programs_per_sm=8),
    ColumnConfig(rows=16, columns=256, warps=8, programs_per_sm=4),
    ColumnConfig(rows=32, columns=256, warps=8, programs_per_sm=2),
    ColumnConfig(rows=32, columns=256, warps=8, programs_per_sm=2, stages=3),
)


def gelu_math(dtype: torch.dtype) -> int:
    """Return the arithmetic of GELU: exp and division for float32, the special-function unit otherwise."""
    plain = INTERPRETED or dtype == torch.float32
    return int(PLAIN.value if plain else UNIT.value)


def column_sums(
    grad: torch.Tensor,
    pre: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    copy: bool = False,
    config: ColumnConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sums of a gradient's columns, (N,), and the tensor that the pass writes, (M, N).

    With ``pre`` the pass writes and sums grad times GELU's slope at ``pre`` (plus ``bias`` if given). With
    ``copy`` it writes a copy of grad. Else it writes nothing, and the second result is None. grad and pre
    are (M, N), bias is (N,), all of one dtype. ``config`` None is the shipped one.
    """
    if config is None:
        slope = SLOPE if bias is None else SLOPE_BIAS
        config = slope if pre is not None else COPY if copy else SUM_ONLY
    grad = grad.contiguous()
    m, n = grad.shape
    written = torch.empty_like(grad) if pre is not None or copy else None
    if m == 0 or n == 0:
        return grad.new_zeros(n), written
    column_blocks = triton.cdiv(n, config.columns)
    chunks = max(1, config.programs_per_sm * num_sms(grad.device) // column_blocks)
    # Whole steps of a program, so that only the last chunk has rows to mask.
    rows_per_chunk = triton.cdiv(triton.cdiv(m, chunks), config.rows) * config.rows
    chunks = triton.cdiv(m, rows_per_chunk)
    partial = torch.empty(chunks, n, dtype=torch.float32, device=grad.device)
    column_pass[(column_blocks * chunks,)](
        grad,
        pre.contiguous() if pre is not None else None,
        bias.contiguous() if bias is not None else None,
        written,
        partial,
        m,
        n,
        rows_per_chunk,
        ROWS=config.rows,
        COLUMNS=config.columns,
        STAGES=config.stages,
        SLOPE=pre is not None,
        COPY=copy,
        MATH=gelu_math(grad.dtype),
        num_warps=config.warps,
    )
    sums = grad.new_empty(n)
    column_total[(triton.cdiv(n, TOTAL["COLUMNS"]),)](partial, sums, chunks, n, **TOTAL)
    return sums, written


def aot_column_kernels(mode: str, bias: bool = False) -> tuple[TritonAotKernel, ...]:
    """Return both kernels for bfloat16; ``mode`` is ``sum``, ``copy`` or ``slope``."""
    slope = SLOPE_BIAS if bias else SLOPE
    config = {"sum": SUM_ONLY, "copy": COPY, "slope": slope}[mode]
    signature = {
        "grad_ptr": "*bf16",
        "pre_ptr": "*bf16" if mode == "slope" else None,
        "bias_ptr": "*bf16" if bias else None,
        "out_ptr": None if mode == "sum" else "*bf16",
        "partial_ptr": "*fp32",
        "m": "i32:16",
        "n": "i32:16",
        "rows_per_chunk": "i32:16",
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "STAGES": config.stages,
        "SLOPE": mode == "slope",
        "COPY": mode == "copy",
        "MATH": gelu_math(torch.bfloat16),
    }
    return (
        TritonAotKernel(
            label=f"columns-{mode}{'-bias' * bias}-bf16",
            kernel=column_pass,
            signature=signature,
            num_warps=config.warps,
        ),
        TritonAotKernel(
            label="columns-total-bf16",
            kernel=column_total,
            signature={
                "partial_ptr": "*fp32",
                "out_ptr": "*bf16",
                "chunks": "i32",
                "n": "i32:16",
                "ROWS": TOTAL["ROWS"],
                "COLUMNS": TOTAL["COLUMNS"],
            },
            num_warps=TOTAL["num_warps"],
        ),
    )


@triton.jit
def column_pass(
    grad_ptr,
    pre_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    m,
    n,
    rows_per_chunk,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SLOPE: tl.constexpr,
    COPY: tl.constexpr,
    MATH: tl.constexpr,
):
    # grad, pre, out: (M, N) contiguous; bias: (N,), added to pre, or None; partial: (chunks, N) float32.
    # A program sums COLUMNS columns over a chunk of rows_per_chunk rows, in a fixed order. On the way it
    # writes out = grad (COPY), or out = grad * gelu'(pre) (SLOPE), which it then sums instead, before it is
    # rounded. Each element is read once and written once.
    chunk = tl.program_id(0) // tl.cdiv(n, COLUMNS)
    columns = tl.program_id(0) % tl.cdiv(n, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    first = chunk * rows_per_chunk
    last = tl.minimum(first + rows_per_chunk, m)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        offsets = rows.to(tl.int64)[:, None] * n + columns[None, :]
        inside = (rows[:, None] < last) & (columns[None, :] < n)
        g = tl.load(grad_ptr + offsets, mask=inside, other=0.0)
        if SLOPE:
            pre = tl.load(pre_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                pre += bias
            dpre = g.to(tl.float32) * gelu_slope(pre, MATH)
            tl.store(out_ptr + offsets, dpre.to(out_ptr.dtype.element_ty), mask=inside)
            total += dpre
        else:
            if COPY:
                tl.store(out_ptr + offsets, g, mask=inside)
            total += g.to(tl.float32)
    sums = tl.sum(total, 0)
    tl.store(partial_ptr + chunk.to(tl.int64) * n + columns, sums, mask=columns < n)


@triton.jit
def column_total(partial_ptr, out_ptr, chunks, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # partial: (chunks, N) float32; out: (N,). A program adds COLUMNS columns, in a fixed order.
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, chunks, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows[:, None] < chunks) & (columns[None, :] < n)
        offsets = rows.to(tl.int64)[:, None] * n + columns[None, :]
        total += tl.load(partial_ptr + offsets, mask=inside, other=0.0)
    sums = tl.sum(total, 0)
    tl.store(out_ptr + columns, sums.to(out_ptr.dtype.element_ty), mask=columns < n)
