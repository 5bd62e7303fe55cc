"""CUDA ladder of the stencil, naive to best: one idea for each step, each step an implementation.

The last step is the implementation ``cuda`` (with_cuda.py). The steps have a forward only.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, Implementation
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, contiguous_like, dtype_name, view_3d

THREADS = 256
# Rows and columns of a block's cells, as in the files; a march has as many columns as a block has threads.
TILES = {"02_shared_halo": (8, 32), "03_register_march": (32, 0)}
STEPS = ("01_naive", *TILES)


@cache
def source(step: str, dtype: torch.dtype) -> CudaSource:
    """Return a step's program for one dtype."""
    return CudaSource(
        file=Path(__file__).with_name(f"{step}.cu"),
        kernels=("stencil",),
        defines=(("WEFT_T", CUDA_TYPES[dtype]),),
        label=f"{step}-{dtype_name(dtype)}",
    )


def apply(step: str, x: torch.Tensor, weights: torch.Tensor, threads: int = THREADS) -> torch.Tensor:
    """Compute the stencil by a step."""
    y = contiguous_like(x)
    if x.numel():
        x3d = view_3d(x)
        batches, rows, columns = x3d.shape
        blocks = -(-x.numel() // threads)
        if step in TILES:
            tall, wide = TILES[step]
            blocks = batches * -(-rows // tall) * -(-columns // (wide or threads))
        arguments = (x3d, weights.contiguous(), y, batches, rows, columns, x3d.stride(0), x3d.stride(1))
        source(step, x.dtype)["stencil"](blocks, threads, *arguments)
    return y


def _implementation(step: str, idea: str) -> Implementation:
    return Implementation(
        operator="stencil",
        name=f"cuda/{step.replace('_', '-')}",
        backend="cuda",
        forward=lambda x, weights: apply(step, x, weights),
        directions=(FORWARD,),
        aot_kernels=tuple(source(step, dtype) for dtype in FLOAT_DTYPES),
        idea=idea,
    )


NAIVE = _implementation("01_naive", "a thread for each cell, five loads")
SHARED_HALO = _implementation("02_shared_halo", "a tile and its halo in shared memory")
REGISTER_MARCH = _implementation(
    "03_register_march", "a thread marches down a column, three cells in registers"
)
