"""Gated activations by PyTorch's functions: an activation and a product, rounded in between."""

from __future__ import annotations

import torch

from weft.core import Implementation


def forward_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(gate) * up).contiguous()


def forward_geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).contiguous()


SWIGLU = Implementation(
    operator="swiglu", name="torch", backend="torch", forward=forward_swiglu, idea="F.silu(gate) * up"
)
GEGLU = Implementation(
    operator="geglu",
    backend="torch",
    forward=forward_geglu,
    idea="F.gelu(gate, approximate='tanh') * up",
)
