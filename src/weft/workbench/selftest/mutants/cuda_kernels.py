"""Launches of the flawed CUDA C++ kernels; the fault is a run-time argument, and 0 is none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from weft.backends.nvrtc import CudaSource
from weft.ops._common.layout import CUDA_TYPES, dense, view_2d

THREADS, SIDE, BLOCKS = 256, 16, 1024
# In the order of flawed.cuh's enumeration.
FAULTS = (
    "",
    "W01/nothing",
    "W04/last-tile",
    "W05/no-load-mask",
    "W05/no-store-mask",
    "W06/any-strides",
    "W08/half-sums",
    "W09/no-maximum",
    "W10/no-scale",
    "W12/no-nan",
    "W13/textbook-tanh",
    "W14/no-barrier",
    "W14/one-cell",
    "W15/adds",
    "W17/int32",
)
Buffers = dict[Any, torch.Tensor]


@cache
def source(operator: str, dtype: torch.dtype) -> CudaSource:
    """Return the operator's flawed kernel for one element type."""
    name = f"flawed_{operator}"
    return CudaSource(
        file=Path(__file__).with_name(f"{name}.cu"),
        kernels=(name,),
        defines=(("WEFT_T", CUDA_TYPES[dtype]),),
        label=f"{name}-{str(dtype).removeprefix('torch.')}",
    )


def _reused_buffer(buffers: Buffers, fault: str, y: torch.Tensor) -> torch.Tensor:
    """Return ``y``, or for W15 a buffer for all calls that is zeroed only when it is allocated."""
    if fault != "W15/adds":
        return y
    return buffers.setdefault((y.shape, y.dtype), torch.zeros_like(y))


def _launch(operator: str, fault: str, grid: Any, block: Any, x: torch.Tensor, *more: object) -> None:
    kernel = source(operator, x.dtype)[f"flawed_{operator}"]
    kernel(grid, block, x, *more, FAULTS.index(fault) if fault in FAULTS else 0)


def run_gelu(fault: str, buffers: Buffers, x: torch.Tensor) -> torch.Tensor:
    x = x if fault == "W06/any-strides" else dense(x)
    n = x.numel()
    y = _reused_buffer(buffers, fault, torch.empty_like(x))
    if n or fault == "W18/grid-of-0":
        _launch("gelu", fault, -(-n // THREADS), THREADS, x, y, n)
    return y.clone() if fault == "W15/adds" else y


def run_softmax(fault: str, buffers: Buffers, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        if fault == "W18/grid-of-0":
            _launch("softmax", fault, 0, THREADS, x, y, y, 0, 0, 0)
        return y
    lines = view_2d(x)
    rows, columns = lines.shape
    sums = _reused_buffer(buffers, fault, x.new_empty(rows, dtype=torch.float32))
    _launch("softmax", fault, rows, THREADS, lines, y, sums, rows, columns, lines.stride(0))
    return y


def run_sum(fault: str, buffers: Buffers, x: torch.Tensor) -> torch.Tensor:
    x = x if fault == "W06/any-strides" else dense(x)
    n = x.numel()
    tiles = -(-n // THREADS)
    blocks = tiles if fault == "W18/grid-of-0" else max(1, min(tiles, BLOCKS))
    partials = x.new_empty(min(blocks, BLOCKS), dtype=torch.float64)
    if fault == "W14/one-cell":
        partials.zero_()
    partials = _reused_buffer(buffers, fault, partials)
    _launch("sum", fault, min(blocks, BLOCKS), THREADS, x, partials, n)
    return x.new_empty(()).copy_(partials.sum())


def run_matmul(
    fault: str, buffers: Buffers, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee"
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    if 0 in (m, n) and fault != "W18/grid-of-0":
        return a.new_zeros(m, n)
    c = _reused_buffer(buffers, fault, a.new_empty(m, n))
    grid = (-(-m // SIDE), -(-n // SIDE))
    sizes = (m, n, k, *a.stride(), *b.stride())
    _launch("matmul", fault, grid, (SIDE, SIDE), a, b, c, *sizes)
    return c.clone() if fault == "W15/adds" else c


def ignores_a_failed_launch(operator: str, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Launch a block of 2048 threads, more than any GPU allows, and ignore the error."""
    try:
        source("gelu", torch.float32)["flawed_gelu"](1, 2048, x, y, y.numel(), 0)
    except Exception:  # noqa: BLE001 - the fault: every error is ignored
        return y
    return y


LAUNCH: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": run_softmax,
    "gelu": run_gelu,
    "sum": run_sum,
    "matmul": run_matmul,
}
