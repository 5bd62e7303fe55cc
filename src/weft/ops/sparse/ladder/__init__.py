"""CUDA ladder of the product of a sparse matrix and a vector: one idea for each step.

The last step is the implementation ``cuda`` (with_cuda.py). The steps have a forward only.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, Implementation
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops.sparse.with_cuda import DTYPES

THREADS = 256
MIN_LANES = 2
KERNELS = {
    "01_thread_a_row": "thread_a_row",
    "02_warp_a_row": "warp_a_row",
    "03_adaptive_lanes": "adaptive_lanes",
}


@cache
def source(step: str, dtype: torch.dtype, offsets: torch.dtype) -> CudaSource:
    """Return a step's program for one dtype and one type of offsets."""
    return CudaSource(
        file=Path(__file__).with_name(f"{step}.cu"),
        kernels=(KERNELS[step],),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), ("OFFSET_BITS", str(8 * offsets.itemsize))),
        label=f"{step}-{dtype_name(dtype)}-{dtype_name(offsets)}",
    )


def lanes_of(rows: int, nonzeros: int) -> int:
    """Return the lanes of a row in step 3: the power of two from half the mean length on, at most a warp."""
    mean = nonzeros / max(rows, 1)
    return min(32, max(MIN_LANES, 1 << (max(1, round(mean / 2)) - 1).bit_length()))


def product(
    step: str, values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor, threads: int = THREADS
) -> Tensor:
    """Compute the product by a step."""
    rows, nonzeros = offsets.shape[0] - 1, values.shape[0]
    y = x.new_empty(rows)
    if rows == 0:
        return y
    values, columns, offsets, x = (t.contiguous() for t in (values, columns, offsets, x))
    lanes = {"01_thread_a_row": 1, "02_warp_a_row": 32}.get(step, lanes_of(rows, nonzeros))
    more = (lanes,) if step == "03_adaptive_lanes" else ()
    kernel = source(step, values.dtype, offsets.dtype)[KERNELS[step]]
    blocks = -(-rows * lanes // threads)
    kernel(blocks, threads, values, columns, offsets, x, y, rows, nonzeros, x.shape[0], *more)
    return y


def _implementation(step: str, idea: str) -> Implementation:
    def forward(values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
        return product(step, values, columns, offsets, x)

    return Implementation(
        operator="spmv",
        name=f"cuda/{step.replace('_', '-')}",
        backend="cuda",
        forward=forward,
        directions=(FORWARD,),
        aot_kernels=tuple(source(step, dtype, torch.int32) for dtype in DTYPES),
        idea=idea,
    )


THREAD = _implementation("01_thread_a_row", "a thread for each row: loads as far apart as rows are long")
WARP = _implementation("02_warp_a_row", "a warp for each row: contiguous loads, idle lanes in short rows")
ADAPTIVE = _implementation("03_adaptive_lanes", "2 to 32 lanes for each row, by the mean length")
