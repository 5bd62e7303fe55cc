"""The pass of a linear operator's backward that sums columns: dbias, in a fixed order of rows.

Partial sums of a chunk of rows each, then a second small kernel: no atomics, the same bits again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from weft.backends.triton_jit import INTERPRETED, TritonSpecimen, triton
from weft.ops._shared.linear_kernels import PLAIN, UNIT, column_pass, column_total

TOTAL = {"ROWS": 512, "COLUMNS": 16, "num_warps": 8}


@dataclass(frozen=True, kw_only=True)
class Columns:
    """``rows x columns`` elements a program at a time, by ``warps`` warps.

    ``resident`` programs a multiprocessor are aimed at: as many as find room at once, and the pass
    has no second wave; or several times as many, and what ends late is a small part. ``stages``
    above 1 fetches as many tiles ahead, through shared memory.
    """

    rows: int
    columns: int
    warps: int
    resident: int
    stages: int = 1


# A pass that only reads fetches tiles ahead: 97 us of 117 for 65536 x 3072 on an H200. One that
# writes does better with many programs, of 56 registers a thread, 96 with a slope: 302 us of 322.
PASS = Columns(rows=16, columns=256, warps=4, resident=4, stages=3)
COPY_PASS = Columns(rows=16, columns=256, warps=4, resident=8)
SLOPE_PASS = Columns(rows=16, columns=256, warps=4, resident=5)
# With a bias, which is kept, 16 rows take 125 registers a thread and eight 68; yet an H200
# is slower with these, many in turns or not: results' sweep-embedding-bias_gelu-2026-11-22.ndjson.
SLOPE_BIAS_PASS = replace(SLOPE_PASS, resident=4)
SLOPE_BIAS_CANDIDATES = (
    SLOPE_BIAS_PASS,
    replace(SLOPE_BIAS_PASS, rows=8, resident=7),
    replace(SLOPE_BIAS_PASS, rows=8, resident=28),
    replace(SLOPE_BIAS_PASS, rows=4, resident=40),
    replace(SLOPE_BIAS_PASS, warps=8, resident=12),
    replace(SLOPE_BIAS_PASS, resident=16),
)
CANDIDATES = (
    PASS,
    COPY_PASS,
    SLOPE_PASS,
    Columns(rows=16, columns=256, warps=4, resident=4),
    Columns(rows=8, columns=256, warps=4, resident=8),
    Columns(rows=16, columns=256, warps=8, resident=4),
    Columns(rows=32, columns=256, warps=8, resident=2),
    Columns(rows=32, columns=256, warps=8, resident=2, stages=3),
)


def math_for(dtype: torch.dtype) -> int:
    """The arithmetic of GELU: float32 by exp and division, half types by the function unit."""
    plain = INTERPRETED or dtype == torch.float32
    return int(PLAIN.value if plain else UNIT.value)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many the device has; 1 on a CPU, where programs are interpreted: few, each of several
    tiles."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def column_sums(
    grad: torch.Tensor,
    pre: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    copy: bool = False,
    config: Columns | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sums of grad's columns, (N,), and what the pass wrote, (M, N).

    That is grad times GELU's slope at ``pre``, or at ``pre`` and ``bias`` together, and its sums,
    where ``pre`` is given; a copy of grad where ``copy`` is set; else None. grad and pre: (M, N),
    bias: (N,), of one dtype. ``config`` None is the one shipped.
    """
    slope = SLOPE_PASS if bias is None else SLOPE_BIAS_PASS
    config = config or (slope if pre is not None else COPY_PASS if copy else PASS)
    grad = grad.contiguous()
    m, n = grad.shape
    written = torch.empty_like(grad) if pre is not None or copy else None
    if m == 0 or n == 0:
        return grad.new_zeros(n), written
    across = triton.cdiv(n, config.columns)
    chunks = max(1, config.resident * multiprocessors(grad.device) // across)
    each = triton.cdiv(triton.cdiv(m, chunks), config.rows) * config.rows
    chunks = triton.cdiv(m, each)
    partial = torch.empty(chunks, n, dtype=torch.float32, device=grad.device)
    column_pass[(across * chunks,)](
        grad,
        pre.contiguous() if pre is not None else None,
        bias.contiguous() if bias is not None else None,
        written,
        partial,
        m,
        n,
        each,
        ROWS=config.rows,
        COLUMNS=config.columns,
        STAGES=config.stages,
        SLOPE=pre is not None,
        COPY=copy,
        MATH=math_for(grad.dtype),
        num_warps=config.warps,
    )
    sums = grad.new_empty(n)
    column_total[(triton.cdiv(n, TOTAL["COLUMNS"]),)](partial, sums, chunks, n, **TOTAL)
    return sums, written


def specimens(way: str, bias: bool = False) -> tuple[TritonSpecimen, ...]:
    """The pass as ``sum``, ``copy`` or ``slope`` for bfloat16, and the total."""
    written = None if way == "sum" else "*bf16"
    slope = SLOPE_BIAS_PASS if bias else SLOPE_PASS
    config = {"sum": PASS, "copy": COPY_PASS, "slope": slope}[way]
    signature = {
        "grad_ptr": "*bf16",
        "pre_ptr": "*bf16" if way == "slope" else None,
        "bias_ptr": "*bf16" if bias else None,
        "out_ptr": written,
        "partial_ptr": "*fp32",
        "m": "i32:16",
        "n": "i32:16",
        "rows_each": "i32:16",
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "STAGES": config.stages,
        "SLOPE": way == "slope",
        "COPY": way == "copy",
        "MATH": math_for(torch.bfloat16),
    }
    return (
        TritonSpecimen(
            label=f"columns-{way}{'-bias' * bias}-bf16",
            kernel=column_pass,
            signature=signature,
            num_warps=config.warps,
        ),
        TritonSpecimen(
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
