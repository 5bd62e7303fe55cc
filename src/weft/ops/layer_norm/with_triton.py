"""Layer norm in Triton: rows read once; see _shared/norm_kernels.py."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared import norm_triton


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> torch.Tensor:
    return norm_triton.forward(x, None, weight, bias, eps)[0]


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, ...]:
    dx, _, dw, db = norm_triton.backward(grad, None, x, weight, eps, centred=True)
    return dx, dw, db


IMPLEMENTATION = Implementation(
    operator="layer_norm",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=norm_triton.specimens(centred=True, add=False),
    idea="whole rows in one program, read once; the weights' gradients by programs that stay",
)
