"""Residual and RMS norm by the library."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared.norm_spec import supports_library


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    s = (x + residual).contiguous()
    norm = torch.nn.functional.rms_norm
    if weight.dtype != x.dtype:  # the library takes one dtype
        y = norm(s.float(), x.shape[-1:], weight, eps).to(x.dtype)
    else:
        y = norm(s, x.shape[-1:], weight, eps)
    return y.contiguous(), s


IMPLEMENTATION = Implementation(
    operator="add_rms_norm",
    name="torch",
    backend="torch",
    forward=forward,
    supports=supports_library,
    idea="x + residual, F.rms_norm",
)
