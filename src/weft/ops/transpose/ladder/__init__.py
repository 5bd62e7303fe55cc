"""CUDA ladder of the transpose, naive to best: one idea for each step, each step an implementation.

The last step is the implementation ``cuda`` (with_cuda.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, Implementation
from weft.ops._common.layout import view_3d
from weft.ops.transpose.spec import empty_transpose
from weft.ops.transpose.with_cuda import MAX_BLOCKS, WORD_TYPES

SIDE, THREADS = 32, 256  # as in tile.cuh: a block of 32 x 8 threads for a tile of 32 x 32 elements
STEPS = ("01_naive", "02_tiled", "03_padded", "04_swizzled")


@cache
def source(step: str, size: int) -> CudaSource:
    """Return a step's program for elements of ``size`` bytes."""
    return CudaSource(
        file=Path(__file__).with_name(f"{step}.cu"),
        kernels=("transpose",),
        defines=(("WEFT_T", WORD_TYPES[size]),),
        label=f"{step}-{8 * size}-bit",
    )


def transpose(step: str, x: torch.Tensor) -> torch.Tensor:
    """Compute the transpose by a step."""
    y = empty_transpose(x)
    if x.numel():
        x3d = view_3d(x)
        batches, rows, columns = x3d.shape
        blocks = batches * -(-rows // SIDE) * -(-columns // SIDE)
        if step == "01_naive":
            blocks = -(-x.numel() // THREADS)
        arguments = (x3d, y, batches, rows, columns, x3d.stride(0), x3d.stride(1))
        source(step, x.element_size())["transpose"](min(blocks, MAX_BLOCKS), THREADS, *arguments)
    return y


def _implementation(step: str, idea: str) -> Implementation:
    return Implementation(
        operator="transpose",
        name=f"cuda/{step.replace('_', '-')}",
        backend="cuda",
        forward=lambda x: transpose(step, x),
        directions=(FORWARD,),
        aot_kernels=tuple(source(step, size) for size in WORD_TYPES),
        idea=idea,
    )


NAIVE = _implementation("01_naive", "a thread for each element; stores a row apart")
TILED = _implementation("02_tiled", "a tile in shared memory; its columns lie in one bank")
PADDED = _implementation("03_padded", "rows padded by an element: no bank conflicts")
SWIZZLED = _implementation("04_swizzled", "elements of a row exchanged by an exclusive or, without padding")
