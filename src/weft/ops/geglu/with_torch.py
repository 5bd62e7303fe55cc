"""GEGLU by the library: its activation and a product, two kernels with a rounding between."""

from __future__ import annotations

import torch

from weft.core import Implementation


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).contiguous()


IMPLEMENTATION = Implementation(
    operator="geglu",
    name="torch",
    backend="torch",
    forward=forward,
    idea="F.gelu(gate, approximate='tanh') * up",
)
