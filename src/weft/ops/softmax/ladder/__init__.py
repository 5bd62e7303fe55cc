"""CUDA ladder of softmax, naive to best: one idea for each step, each step an implementation.

The kernels of steps 1 to 4 are in this folder. Step 5 is softmax_long.cu, which the last step (``cuda``) also
uses for rows that do not fit in a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, Implementation
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, contiguous_like, dtype_name, view_2d
from weft.ops.softmax import with_cuda

HERE = Path(__file__).parent
THREADS = 256


def _source(step: str, dtype: torch.dtype) -> CudaSource:
    return CudaSource(
        file=HERE / f"{step}.cu",
        kernels=(f"softmax_{step[3:]}",),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), ("THREADS", str(THREADS))),
        label=f"{step}-{dtype_name(dtype)}",
    )


def _forward(sources: dict[torch.dtype, CudaSource], rows_per_block: int, x: torch.Tensor) -> torch.Tensor:
    y = contiguous_like(x)
    if x.numel() == 0:
        return y
    x2d = view_2d(x)
    rows, columns = x2d.shape
    source = sources[x.dtype]
    blocks = -(-rows // rows_per_block)
    source[source.kernels[0]](blocks, THREADS, x2d, y, rows, columns, x2d.stride(0))
    return y


def _long(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:
        return contiguous_like(x)
    return with_cuda.forward_with(with_cuda.Config(strategy="long", threads=512), x)


def _implementation(
    step: str, idea: str, forward: Callable[..., torch.Tensor], aot_kernels: tuple[CudaSource, ...]
) -> Implementation:
    return Implementation(
        operator="softmax",
        name=f"cuda/{step.replace('_', '-')}",
        backend="cuda",
        forward=forward,
        directions=(FORWARD,),
        supports=with_cuda.supports,
        aot_kernels=aot_kernels,
        idea=idea,
    )


def _single_kernel_step(step: str, rows_per_block: int, idea: str) -> Implementation:
    sources = {dtype: _source(step, dtype) for dtype in FLOAT_DTYPES}
    forward = partial(_forward, sources, rows_per_block)
    return _implementation(step, idea, forward, tuple(sources.values()))


THREE_PASSES = _single_kernel_step("01_three_passes", THREADS, "one thread a row, three passes over memory")
SHARED = _single_kernel_step("02_shared_reduction", 1, "a block a row, trees in shared memory")
WARP = _single_kernel_step("03_warp_per_row", THREADS // 32, "a warp a row, shuffles, no barrier")
ONLINE = _single_kernel_step("04_online_registers", 1, "maximum and sum in one pass, online in registers")
LONG = _implementation(
    "05_long_rows",
    "16-byte accesses, several blocks a row where rows are few",
    _long,
    tuple(
        with_cuda.source(with_cuda.Config(strategy="long", threads=512), dtype, 16 // dtype.itemsize, False)
        for dtype in FLOAT_DTYPES
    ),
)
