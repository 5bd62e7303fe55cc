"""``mlp_gelu`` composed by hand from torch calls, and ``torch.compile`` of that."""

from __future__ import annotations

import math

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._common.products import by_rows
from weft.ops._common.products.by_rows import Product


def forward(
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    fc_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    *,
    product: Product = torch.matmul,
) -> tuple[torch.Tensor, ...]:
    pre = product(x, fc_weight.t()) + fc_bias
    # GELU in float32: half types would lose the digits of 1 + tanh in the negative tail.
    wide = pre.float()
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    hidden = (0.5 * wide * (1 + torch.tanh(u))).to(x.dtype)
    y = product(hidden, proj_weight.t()) + proj_bias
    return y, hidden.detach(), pre.detach()


IMPLEMENTATION = by_rows.with_rows(
    Implementation(
        operator="mlp_gelu",
        backend="eager",
        forward=forward,
        idea="two products with their biases, and ten passes between them",
    )
)
COMPILED = compiled(IMPLEMENTATION)
