"""The scaled product by its definition: both factors times their scales in float32, then their product."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._common.cublas import call_at_precision
from weft.ops.scaled_matmul.spec import widened


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: str = "bfloat16",
) -> torch.Tensor:
    wide_a, wide_b = widened(a, b, scale_a, scale_b)
    product = call_at_precision(torch.mm, wide_a, "ieee", wide_a, wide_b)
    return product.to(getattr(torch, out_dtype))  # type: ignore[no-any-return]


IMPLEMENTATION = Implementation(
    operator="scaled_matmul",
    backend="eager",
    forward=forward,
    directions=("forward",),
    idea="factors times scales, then a product, in float32",
)
