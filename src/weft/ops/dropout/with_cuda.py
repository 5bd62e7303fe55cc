"""Dropout in CUDA C++: one 16-byte vector a thread; see dropout.cu."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.core import Implementation
from weft.ops._common.elementwise import ElementwiseKernels
from weft.ops._common.layout import contiguous_like
from weft.ops._common.philox_dropout import drops_all, pack_threshold_and_scale

KERNELS = ElementwiseKernels(Path(__file__).with_name("dropout.cu"), "dropout_apply")


def forward(x: torch.Tensor, *, p: float, seed: int) -> torch.Tensor:
    y = contiguous_like(x)
    if drops_all(p):
        return y.zero_()
    KERNELS.launch("dropout_apply", (x.contiguous(), y), seed, pack_threshold_and_scale(p))
    return y


def backward(grad: torch.Tensor, *, p: float, seed: int) -> tuple[torch.Tensor]:
    return (forward(grad, p=p, seed=seed),)


IMPLEMENTATION = Implementation(
    operator="dropout",
    backend="cuda",
    forward=forward,
    backward=backward,
    aot_kernels=KERNELS.aot_kernels,
    idea="one 16-byte vector a thread, random numbers made in registers",
)
