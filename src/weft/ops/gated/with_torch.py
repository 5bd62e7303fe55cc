"""Gated activations by PyTorch's functions: an activation and a product, rounded in between."""

from __future__ import annotations

import torch

from weft.core import Implementation


def forward_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(gate) * up).contiguous()


def forward_geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).contiguous()


def _are_contiguous(inputs: tuple[torch.Tensor, ...]) -> bool:
    return all(x.is_contiguous() for x in inputs)


# PyTorch's functions of repeated calls, whose results need no copy.
_silu, _gelu = torch._C._nn.silu, torch._C._nn.gelu
forward_swiglu.like = lambda inputs, params: (  # type: ignore[attr-defined]
    (lambda gate, up: _silu(gate) * up) if _are_contiguous(inputs) else None
)
forward_geglu.like = lambda inputs, params: (  # type: ignore[attr-defined]
    (lambda gate, up: _gelu(gate, approximate="tanh") * up) if _are_contiguous(inputs) else None
)

SWIGLU = Implementation(
    operator="swiglu", name="torch", backend="torch", forward=forward_swiglu, idea="F.silu(gate) * up"
)
GEGLU = Implementation(
    operator="geglu",
    backend="torch",
    forward=forward_geglu,
    idea="F.gelu(gate, approximate='tanh') * up",
)
