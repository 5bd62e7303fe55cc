"""RMS norm in CUDA C++: rows read once; see _shared/norm*.cu."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared import norm_cuda


def forward(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return norm_cuda.forward(x, None, weight, None, eps)[0]


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, ...]:
    dx, _, dw, _ = norm_cuda.backward(grad, None, x, weight, eps, centred=False)
    return dx, dw


IMPLEMENTATION = Implementation(
    operator="rms_norm",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=norm_cuda.supports,
    specimens=norm_cuda.specimens(centred=False, add=False),
    idea="rows read once, 16 bytes at a time, by blocks or by teams that stay",
)
