"""Residual and layer norm by the library."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared.norm_spec import supports_library


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    s = (x + residual).contiguous()
    norm = torch.nn.functional.layer_norm
    if weight.dtype != x.dtype:  # the library takes one dtype
        y = norm(s.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)
    else:
        y = norm(s, x.shape[-1:], weight, bias, eps)
    return y.contiguous(), s


IMPLEMENTATION = Implementation(
    operator="add_layer_norm",
    name="torch",
    backend="torch",
    forward=forward,
    supports=supports_library,
    idea="x + residual, F.layer_norm",
)
