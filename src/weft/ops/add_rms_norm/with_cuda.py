"""Residual and RMS norm in CUDA C++: rows read once; see _shared/norm*.cu."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared import norm_cuda


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return norm_cuda.forward(x, residual, weight, None, eps)


def backward(
    grad: torch.Tensor, more: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, ...]:
    dx, dr, dw, _ = norm_cuda.backward(grad, more, s, weight, eps, centred=False)
    return dx, dr, dw


IMPLEMENTATION = Implementation(
    operator="add_rms_norm",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=norm_cuda.supports,
    specimens=norm_cuda.specimens(centred=False, add=True),
    idea="rows read once, 16 bytes at a time, by blocks or by teams that stay",
)
