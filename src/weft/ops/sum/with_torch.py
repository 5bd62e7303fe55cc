"""Sum by PyTorch: one call of Tensor.sum."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops.sum.spec import spread


def forward(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


IMPLEMENTATION = Implementation(
    operator="sum",
    backend="torch",
    forward=forward,
    backward=spread,
    idea="Tensor.sum",
)
