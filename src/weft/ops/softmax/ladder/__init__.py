"""The CUDA ladder of softmax, naive to best, one idea a step, each an implementation.

Steps 1 to 4 are the files beside this. Step 5 is softmax_long.cu, which the last step (``cuda``)
also uses for rows that no block holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, Implementation
from weft.ops.softmax import with_cuda
from weft.ops.softmax.launch import Config
from weft.ops.softmax.rows import as_rows

HERE = Path(__file__).parent
THREADS = 256


def _source(step: str, dtype: torch.dtype) -> CudaSource:
    return CudaSource(
        file=HERE / f"{step}.cu",
        kernels=(f"softmax_{step[3:]}",),
        defines=(("WEFT_T", with_cuda.TYPES[dtype]), ("THREADS", str(THREADS))),
        label=f"{step}-{str(dtype).removeprefix('torch.')}",
    )


def _forward(
    sources: dict[torch.dtype, CudaSource], rows_a_block: int, x: torch.Tensor
) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    lines = as_rows(x)
    rows, columns = lines.shape
    source = sources[x.dtype]
    blocks = -(-rows // rows_a_block)
    source[source.kernels[0]](blocks, THREADS, lines, y, rows, columns, lines.stride(0))
    return y


def _long(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return with_cuda.forward_with(Config(strategy="long", threads=512), x)


def _step(
    step: str, idea: str, forward: Callable[..., torch.Tensor], specimens: tuple[CudaSource, ...]
) -> Implementation:
    return Implementation(
        operator="softmax",
        name=f"cuda/{step.replace('_', '-')}",
        backend="cuda",
        forward=forward,
        directions=(FORWARD,),
        supports=with_cuda.supports,
        specimens=specimens,
        idea=idea,
    )


def _own(step: str, rows_a_block: int, idea: str) -> Implementation:
    sources = {dtype: _source(step, dtype) for dtype in with_cuda.TYPES}
    forward = partial(_forward, sources, rows_a_block)
    return _step(step, idea, forward, tuple(sources.values()))


THREE_PASSES = _own("01_three_passes", THREADS, "one thread a row, three passes over memory")
SHARED = _own("02_shared_reduction", 1, "a block a row, trees in shared memory")
WARP = _own("03_warp_per_row", THREADS // 32, "a warp a row, shuffles, no barrier")
ONLINE = _own("04_online_registers", 1, "maximum and sum in one pass, online in registers")
LONG = _step(
    "05_long_rows",
    "16-byte accesses, several blocks a row where rows are few",
    _long,
    tuple(
        with_cuda.source(Config(strategy="long", threads=512), dtype, 16 // dtype.itemsize, False)
        for dtype in with_cuda.TYPES
    ),
)
