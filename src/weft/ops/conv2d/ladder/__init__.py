"""CUDA ladder of the convolution, naive to best: one idea for each step, each step an implementation.

The last step is the implementation ``cuda`` (with_cuda.py). The steps have a forward only.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, Implementation
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, dtype_name
from weft.ops.conv2d.spec import empty_output
from weft.ops.conv2d.with_cuda import adjacent_columns, count_blocks, supports

THREADS = 256
OUT, SIDE = 8, 16  # outputs of a thread in steps 2 and 3, sides of a tile in step 3, as in the files
STEPS = ("01_naive", "02_register_outputs", "03_shared_halo")


@cache
def source(step: str, dtype: torch.dtype) -> CudaSource:
    """Return a step's program for one dtype."""
    return CudaSource(
        file=Path(__file__).with_name(f"{step}.cu"),
        kernels=("conv2d",),
        defines=(("WEFT_T", CUDA_TYPES[dtype]),),
        label=f"{step}-{dtype_name(dtype)}",
    )


def apply(step: str, x: torch.Tensor, weight: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Compute the convolution by a step."""
    y = empty_output(x, weight, padding)
    if y.numel():
        x = adjacent_columns(x)
        images, outputs, rows, columns = y.shape
        blocks = {
            "01_naive": -(-y.numel() // THREADS),
            "02_register_outputs": -(-images * -(-outputs // OUT) * rows * columns // THREADS),
            "03_shared_halo": count_blocks(y, SIDE, SIDE, OUT),
        }[step]
        sizes = (images, *x.shape[1:], outputs, rows, columns, padding, *weight.shape[2:], *x.stride()[:3])
        source(step, x.dtype)["conv2d"](blocks, THREADS, x, weight.contiguous(), y, *sizes)
    return y


def _implementation(step: str, idea: str) -> Implementation:
    def forward(x: torch.Tensor, weight: torch.Tensor, *, padding: int = 0) -> torch.Tensor:
        return apply(step, x, weight, padding)

    return Implementation(
        operator="conv2d",
        name=f"cuda/{step.replace('_', '-')}",
        backend="cuda",
        forward=forward,
        directions=(FORWARD,),
        supports=supports,
        aot_kernels=tuple(source(step, dtype) for dtype in FLOAT_DTYPES),
        idea=idea,
    )


NAIVE = _implementation("01_naive", "a thread for each output")
REGISTER_OUTPUTS = _implementation("02_register_outputs", "8 output channels of a pixel in registers")
SHARED_HALO = _implementation("03_shared_halo", "a channel's tile and its halo in shared memory")
