"""Layer norm by the library."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared.norm_spec import supports_library


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> torch.Tensor:
    norm = torch.nn.functional.layer_norm
    if weight.dtype != x.dtype:  # the library takes one dtype
        y = norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)
    else:
        y = norm(x, x.shape[-1:], weight, bias, eps)
    return y.contiguous()


IMPLEMENTATION = Implementation(
    operator="layer_norm",
    name="torch",
    backend="torch",
    forward=forward,
    supports=supports_library,
    idea="F.layer_norm",
)
