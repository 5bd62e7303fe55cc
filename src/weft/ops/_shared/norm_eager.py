"""The norms composed by hand from torch calls, in float32: what eager and compile run."""

from __future__ import annotations

import torch


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """(x - mean) rstd weight + bias where there is a bias, else x rstd weight."""
    wide = x.float()
    if bias is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).contiguous()


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, centred: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias) in float32, from what was normalised; dbias means nothing without."""
    g, wide = grad.float(), x.float()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    hat, gw = wide * scale, g * weight.float()
    dx = gw - hat * (gw * hat).mean(-1, keepdim=True)
    if centred:
        dx = dx - gw.mean(-1, keepdim=True)
    columns = x.shape[-1]
    dw = (g * hat).reshape(-1, columns).sum(0) if columns else weight.float()
    db = g.reshape(-1, columns).sum(0) if columns else weight.float()
    return (dx * scale).contiguous(), dw, db
