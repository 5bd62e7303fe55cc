"""CUDA ladder of the histogram, naive to best: one idea for each step, each step an implementation.

The last step is the implementation ``cuda`` (with_cuda.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, YES, Case, Implementation, Support, no
from weft.machine.device_limits import num_sms
from weft.ops._common.layout import dtype_name
from weft.ops.histogram.with_cuda import TABLE, TYPES, arguments_of

THREADS = 256
BLOCKS = 8  # for each SM: its 2048 threads
WARPS = THREADS // 32
# The most bins of each step: its tables have 8192 counters.
MAX_BINS = {
    "01_global_atomics": None,
    "02_shared": TABLE,
    "03_privatised": TABLE // WARPS,
    "04_warp_aggregated": TABLE,
    "05_sorted": TABLE,
}


@cache
def source(step: str, dtype: torch.dtype, threads: int = THREADS) -> CudaSource:
    """Return a step's program for one dtype."""
    return CudaSource(
        file=Path(__file__).with_name(f"{step}.cu"),
        kernels=("histogram",),
        defines=(("WEFT_T", TYPES[dtype]), ("THREADS", str(threads))),
        label=f"{step}-{dtype_name(dtype)}",
    )


def count(
    step: str, x: torch.Tensor, bins: int, low: float | None, high: float | None, threads: int = THREADS
) -> torch.Tensor:
    """Compute the histogram by a step."""
    if x.numel() == 0:
        return torch.zeros(bins, dtype=torch.int64, device=x.device)
    counts, arguments = arguments_of(x, bins, low, high)
    blocks = min(-(-x.numel() // threads), BLOCKS * num_sms(x.device))
    source(step, x.dtype, threads)["histogram"](blocks, threads, *arguments)
    return counts


def _implementation(step: str, idea: str) -> Implementation:
    most = MAX_BINS[step]

    def forward(
        x: torch.Tensor, *, bins: int, low: float | None = None, high: float | None = None
    ) -> torch.Tensor:
        return count(step, x, bins, low, high)

    def supports(case: Case, device: str) -> Support:
        if most is not None and int(str(case.params["bins"])) > most:
            return no(f"the step has shared memory for {most} bins; use impl='cuda'")
        return YES

    return Implementation(
        operator="histogram",
        name=f"cuda/{step.replace('_', '-')}",
        backend="cuda",
        forward=forward,
        directions=(FORWARD,),
        supports=supports,
        aot_kernels=tuple(source(step, dtype) for dtype in TYPES),
        idea=idea,
    )


GLOBAL_ATOMICS = _implementation("01_global_atomics", "an atomic addition in memory for each element")
SHARED = _implementation("02_shared", "a table in shared memory for each block")
PRIVATISED = _implementation("03_privatised", "a table for each warp")
WARP_AGGREGATED = _implementation(
    "04_warp_aggregated", "one addition for the lanes of a warp that have the same bin"
)
SORTED = _implementation("05_sorted", "bins of a chunk sorted, then one addition for each run")
