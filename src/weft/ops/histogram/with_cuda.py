"""Histogram in CUDA C++ by counters of each lane in shared memory; see histogram.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, Implementation
from weft.machine.device_limits import num_sms
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, dense, dtype_name, flat
from weft.ops.histogram.spec import float_range

THREADS = 512
BLOCKS = 3  # for each SM: 1536 threads, and 96 KiB of counters
TABLE, TILE_BYTES = 8192, 64  # counters of a block, and bytes of a thread at a time, as in histogram.cu
MAX_COLUMNS = 32
TYPES = {dtype: CUDA_TYPES[dtype] for dtype in (*FLOAT_DTYPES, torch.int32)} | {torch.uint8: "unsigned char"}


@cache
def source(dtype: torch.dtype, columns: int, threads: int = THREADS) -> CudaSource:
    """Return the program for a dtype and a number of counters for each bin."""
    numbers = (("COLUMNS", columns), ("THREADS", threads))
    return CudaSource(
        file=Path(__file__).with_name("histogram.cu"),
        kernels=("count_in_shared", "count_in_memory"),
        defines=(("WEFT_T", TYPES[dtype]), *((name, str(value)) for name, value in numbers)),
        label=f"{dtype_name(dtype)}-{columns}",
    )


def columns_of(dtype: torch.dtype, bins: int) -> int:
    """Return the counters of a block for each bin, a power of two; 0 if there are more bins than counters."""
    if dtype == torch.uint8:
        return MAX_COLUMNS
    columns = MAX_COLUMNS
    while columns * bins > TABLE:
        columns //= 2
    return columns


def arguments_of(
    x: torch.Tensor, bins: int, low: float | None, high: float | None
) -> tuple[torch.Tensor, tuple[object, ...]]:
    """Return zeroed counts, and the arguments of any of the operator's kernels; ``x`` is not empty."""
    counts = torch.zeros(bins, dtype=torch.int64, device=x.device)
    limits = float_range(bins, low, high) if low is not None and high is not None else (0.0, 0.0, 0.0)
    return counts, (flat(dense(x)), counts, x.numel(), bins, *limits)


def count(
    x: torch.Tensor,
    bins: int,
    low: float | None,
    high: float | None,
    threads: int = THREADS,
    blocks_an_sm: int = BLOCKS,
) -> torch.Tensor:
    """Compute the histogram with ``blocks_an_sm`` blocks of ``threads`` threads on each SM."""
    if x.numel() == 0:
        return torch.zeros(bins, dtype=torch.int64, device=x.device)
    counts, arguments = arguments_of(x, bins, low, high)
    columns = columns_of(x.dtype, bins)
    kernel = "count_in_shared" if columns else "count_in_memory"
    tiles = -(-x.numel() * x.element_size() // (threads * TILE_BYTES))
    blocks = min(tiles, blocks_an_sm * num_sms(x.device, interpreted=2))
    source(x.dtype, max(columns, 1), threads)[kernel](blocks, threads, *arguments)
    return counts


def forward(
    x: torch.Tensor, *, bins: int, low: float | None = None, high: float | None = None
) -> torch.Tensor:
    return count(x, bins, low, high)


IMPLEMENTATION = Implementation(
    operator="histogram",
    backend="cuda",
    forward=forward,
    directions=(FORWARD,),
    aot_kernels=(
        *(source(dtype, MAX_COLUMNS) for dtype in TYPES),
        *(source(torch.float32, 1 << k) for k in range(5)),
    ),
    idea="a counter of each bin for each lane, in a bank of its own",
)
