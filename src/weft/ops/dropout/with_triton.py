"""Dropout in Triton: one pass, a block of random words for eight; see philox_dropout_triton.py."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._common.elementwise_triton import SHIPPED, elementwise_aot_kernels
from weft.ops._common.philox_dropout_triton import dropout, dropout_apply


def forward(x: torch.Tensor, *, p: float, seed: int) -> torch.Tensor:
    return dropout(SHIPPED[x.element_size()], x, p, seed)


def backward(grad: torch.Tensor, *, p: float, seed: int) -> tuple[torch.Tensor]:
    return (forward(grad, p=p, seed=seed),)


SCALARS = {"low": "i32", "high": "i32", "limit": "i32", "scale": "fp32"}
IMPLEMENTATION = Implementation(
    operator="dropout",
    backend="triton",
    forward=forward,
    backward=backward,
    aot_kernels=elementwise_aot_kernels({dropout_apply: ("x_ptr", "y_ptr")}, SCALARS),
    idea="one fused pass, random numbers made in registers",
)
