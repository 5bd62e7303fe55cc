"""Residual and RMS norm in Triton: rows read once; see _shared/norm_kernels.py."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared import norm_triton


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return norm_triton.forward(x, residual, weight, None, eps)


def backward(
    grad: torch.Tensor, more: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, ...]:
    dx, dr, dw, _ = norm_triton.backward(grad, more, s, weight, eps, centred=False)
    return dx, dr, dw


IMPLEMENTATION = Implementation(
    operator="add_rms_norm",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=norm_triton.specimens(centred=False, add=True),
    idea="whole rows in one program, read once; the weights' gradients by programs that stay",
)
