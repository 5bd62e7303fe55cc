"""Residual and layer norm in Triton: rows read once; see _shared/norm_kernels.py."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared import norm_triton


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return norm_triton.forward(x, residual, weight, bias, eps)


def backward(
    grad: torch.Tensor, more: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, ...]:
    dx, dr, dw, db = norm_triton.backward(grad, more, s, weight, eps, centred=True)
    return dx, dr, dw, db


IMPLEMENTATION = Implementation(
    operator="add_layer_norm",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=norm_triton.specimens(centred=True, add=True),
    idea="whole rows in one program, read once; the weights' gradients by programs that stay",
)
