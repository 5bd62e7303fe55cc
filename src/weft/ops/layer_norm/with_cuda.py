"""Layer norm in CUDA C++: rows read once; see _shared/norm*.cu."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared import norm_cuda


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> torch.Tensor:
    return norm_cuda.forward(x, None, weight, bias, eps)[0]


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, ...]:
    dx, _, dw, db = norm_cuda.backward(grad, None, x, weight, eps, centred=True)
    return dx, dw, db


IMPLEMENTATION = Implementation(
    operator="layer_norm",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=norm_cuda.supports,
    specimens=norm_cuda.specimens(centred=True, add=False),
    idea="rows read once, 16 bytes at a time, by blocks or by teams that stay",
)
