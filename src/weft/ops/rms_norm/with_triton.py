"""RMS norm in Triton: rows read once; see _shared/norm_kernels.py."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared import norm_triton


def forward(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return norm_triton.forward(x, None, weight, None, eps)[0]


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, ...]:
    dx, _, dw, _ = norm_triton.backward(grad, None, x, weight, eps, centred=False)
    return dx, dw


IMPLEMENTATION = Implementation(
    operator="rms_norm",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=norm_triton.specimens(centred=False, add=False),
    idea="whole rows in one program, read once; the weights' gradients by programs that stay",
)
