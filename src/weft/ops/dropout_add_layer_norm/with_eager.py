"""Dropout, residual and layer norm composed by hand from torch calls, in float32."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared import norm_eager
from weft.ops._shared.philox_dropout import kept, scale


def forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    p: float,
    seed: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    dropped = torch.where(kept(x, p, seed), x.float() * scale(p), 0.0)
    s = (dropped + residual.float()).to(x.dtype).contiguous()
    return norm_eager.forward(s, weight, bias, eps), s


def backward(
    grad: torch.Tensor,
    more: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    *,
    p: float,
    seed: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    ds, dw, db = norm_eager.backward(grad, s, weight, eps, centred=True)
    ds = ds + more.float()
    dx = torch.where(kept(s, p, seed), ds * scale(p), 0.0)
    return dx.to(s.dtype), ds.to(s.dtype), dw.to(weight.dtype), db.to(weight.dtype)


IMPLEMENTATION = Implementation(
    operator="dropout_add_layer_norm",
    name="eager",
    backend="eager",
    forward=forward,
    backward=backward,
    idea="Philox, add, mean, square, mean, rsqrt, mul, add",
)
