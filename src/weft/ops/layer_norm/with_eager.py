"""Layer norm composed by hand from torch calls, in float32; ``compile`` fuses them."""

from __future__ import annotations

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._shared import norm_eager


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> torch.Tensor:
    return norm_eager.forward(x, weight, bias, eps)


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, ...]:
    dx, dw, db = norm_eager.backward(grad, x, weight, eps, centred=True)
    return dx.to(x.dtype), dw.to(weight.dtype), db.to(weight.dtype)


IMPLEMENTATION = Implementation(
    operator="layer_norm",
    name="eager",
    backend="eager",
    forward=forward,
    backward=backward,
    idea="mean, sub, square, mean, rsqrt, mul, add",
)
COMPILED = compiled(IMPLEMENTATION)
