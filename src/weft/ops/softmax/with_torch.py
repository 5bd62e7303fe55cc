"""Softmax by the library: one fused kernel each way."""

from __future__ import annotations

import torch

from weft.core import Implementation


def forward(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


# One Python function less between a repeated call and PyTorch's own.
forward.like = lambda inputs, params: lambda x: torch.softmax(x, -1)  # type: ignore[attr-defined]

IMPLEMENTATION = Implementation(
    operator="softmax",
    backend="torch",
    forward=forward,
    idea="torch.softmax",
)
