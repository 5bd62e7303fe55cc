"""Softmax by the library: one fused kernel each way."""

from __future__ import annotations

import torch

from weft.core import Implementation


def forward(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


IMPLEMENTATION = Implementation(
    operator="softmax",
    backend="torch",
    forward=forward,
    idea="torch.softmax",
)
