"""The norms composed from torch calls, in float32; ``compile`` fuses them."""

from __future__ import annotations

from typing import Any

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._common.philox_dropout import keep_mask, keep_scale
from weft.ops.norms import spec


def normalise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return (x - mean) rstd weight + bias, or x rstd weight if there is no bias."""
    wide = x.float()
    if bias is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).contiguous()


def norm_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, centred: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dx, dweight, dbias) in float32; ``x`` is the normalised tensor. RMS norm ignores dbias."""
    g, wide = grad.float(), x.float()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    xhat, gw = wide * rstd, g * weight.float()
    dx = gw - xhat * (gw * xhat).mean(-1, keepdim=True)
    if centred:
        dx = dx - gw.mean(-1, keepdim=True)
    columns = x.shape[-1]
    # reshape(-1, 0) has no meaning: rows without columns have empty gradients like the weight's.
    dw = (g * xhat).reshape(-1, columns).sum(0) if columns else weight.float()
    db = g.reshape(-1, columns).sum(0) if columns else weight.float()
    return (dx * rstd).contiguous(), dw, db


def _implementation(norm: spec.NormVariant, idea: str) -> Implementation:
    def forward(*inputs: torch.Tensor, eps: float, p: float = 0.0, seed: int = 0) -> Any:
        x, residual, weight, bias = norm.unpack_inputs(inputs)
        if residual is None:
            return normalise(x, weight, bias, eps)
        terms = x.float()
        if norm.dropout:
            terms = torch.where(keep_mask(x, p, seed), terms * keep_scale(p), 0.0)
        s = (terms + residual.float()).to(x.dtype).contiguous()
        return normalise(s, weight, bias, eps), s

    def backward(
        *tensors: torch.Tensor, eps: float, p: float = 0.0, seed: int = 0
    ) -> tuple[torch.Tensor, ...]:
        grad, grad_s, s, weight = norm.unpack_backward(tensors)
        ds, dw, db = norm_gradients(grad, s, weight, eps, norm.centred)
        if grad_s is not None:
            ds = ds + grad_s.float()
        dresidual = ds.to(s.dtype)
        if norm.dropout:
            dx = torch.where(keep_mask(s, p, seed), ds * keep_scale(p), 0.0).to(s.dtype)
        elif norm.residual:
            dx = dresidual.clone()  # two gradients may not share memory
        else:
            dx = dresidual
        return norm.select_gradients(dx, dresidual, dw.to(weight.dtype), db.to(weight.dtype))

    return Implementation(
        operator=norm.name,
        backend="eager",
        forward=forward,
        backward=backward,
        idea=idea,
    )


LAYER_NORM = _implementation(spec.LAYER_NORM_VARIANT, "mean, sub, square, mean, rsqrt, mul, add")
RMS_NORM = _implementation(spec.RMS_NORM_VARIANT, "square, mean, rsqrt, mul")
ADD_LAYER_NORM = _implementation(spec.ADD_LAYER_NORM_VARIANT, "add, mean, square, mean, rsqrt, mul, add")
ADD_RMS_NORM = _implementation(spec.ADD_RMS_NORM_VARIANT, "add, square, mean, rsqrt, mul")
DROPOUT_ADD_LAYER_NORM = _implementation(
    spec.DROPOUT_VARIANT, "Philox, add, mean, square, mean, rsqrt, mul, add"
)
LAYER_NORM_COMPILED = compiled(LAYER_NORM)
RMS_NORM_COMPILED = compiled(RMS_NORM)
ADD_LAYER_NORM_COMPILED = compiled(ADD_LAYER_NORM)
ADD_RMS_NORM_COMPILED = compiled(ADD_RMS_NORM)
