"""Residual and RMS norm composed by hand from torch calls, in float32; ``compile`` fuses them."""

from __future__ import annotations

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._shared import norm_eager


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    s = (x.float() + residual.float()).to(x.dtype).contiguous()
    return norm_eager.forward(s, weight, None, eps), s


def backward(
    grad: torch.Tensor, more: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, ...]:
    ds, dw, _ = norm_eager.backward(grad, s, weight, eps, centred=False)
    ds = (ds + more.float()).to(s.dtype)
    return ds, ds.clone(), dw.to(weight.dtype)


IMPLEMENTATION = Implementation(
    operator="add_rms_norm",
    name="eager",
    backend="eager",
    forward=forward,
    backward=backward,
    idea="add, square, mean, rsqrt, mul",
)
COMPILED = compiled(IMPLEMENTATION)
