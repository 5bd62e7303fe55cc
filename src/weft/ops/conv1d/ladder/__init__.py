"""CUDA ladder of the depthwise convolution, naive to best: one idea for each step, each an implementation.

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
OUTPUTS, TILE = 16, 1024  # of a thread in step 2 and of a block in step 3, as in the files
STEPS = ("01_naive", "02_register_window", "03_shared_halo")


@cache
def source(step: str, dtype: torch.dtype, taps: int) -> CudaSource:
    """Return a step's program for one dtype and number of coefficients."""
    return CudaSource(
        file=Path(__file__).with_name(f"{step}.cu"),
        kernels=("conv1d",),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), ("TAPS", str(taps))),
        label=f"{step}-{dtype_name(dtype)}-k{taps}",
    )


def apply(
    step: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, threads: int = THREADS
) -> torch.Tensor:
    """Compute the convolution by a step."""
    y = contiguous_like(x)
    if x.numel():
        x3d = view_3d(x)
        batches, channels, length = x3d.shape
        rows = batches * channels
        blocks = {
            "01_naive": -(-rows * length // threads),
            "02_register_window": -(-rows * -(-length // OUTPUTS) // threads),
            "03_shared_halo": rows * -(-length // TILE),
        }[step]
        tensors = (x3d, weight.contiguous(), bias.contiguous(), y)
        sizes = (batches, channels, length, x3d.stride(0), x3d.stride(1))
        source(step, x.dtype, weight.shape[1])["conv1d"](blocks, threads, *tensors, *sizes)
    return y


def _implementation(step: str, idea: str) -> Implementation:
    return Implementation(
        operator="conv1d",
        name=f"cuda/{step.replace('_', '-')}",
        backend="cuda",
        forward=lambda x, weight, bias: apply(step, x, weight, bias),
        directions=(FORWARD,),
        aot_kernels=tuple(source(step, dtype, 4) for dtype in FLOAT_DTYPES),
        idea=idea,
    )


NAIVE = _implementation("01_naive", "a thread for each output, K elements and K coefficients loaded")
REGISTER_WINDOW = _implementation("02_register_window", "coefficients and a sliding window in registers")
SHARED_HALO = _implementation("03_shared_halo", "a tile of a row and its halo in shared memory")
