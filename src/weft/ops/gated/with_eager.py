"""Gated activations composed of torch calls in float32; torch.compile fuses them for ``compile``."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.core.implementation import with_invariant

Activation = Callable[[torch.Tensor], torch.Tensor]


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def invariant_silu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(x) by a tanh: torch's sigmoid has another code for what fills no vector, tanh has not."""
    return 0.5 * x * (1 + torch.tanh(0.5 * x))


def gelu(x: torch.Tensor) -> torch.Tensor:
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(u))


def _forward(activation: Activation) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (activation(gate.float()) * up.float()).to(gate.dtype).contiguous()

    return forward


def _implementation(operator_name: str, activation: Activation, invariant: Activation) -> Implementation:
    implementation = Implementation(
        operator=operator_name,
        backend="eager",
        forward=_forward(activation),
        idea="torch calls one after another",
    )
    return with_invariant(implementation, forward=_forward(invariant), devices=("cpu",))


SWIGLU = _implementation("swiglu", silu, invariant_silu)
GEGLU = _implementation("geglu", gelu, gelu)
SWIGLU_COMPILED = compiled(SWIGLU)
GEGLU_COMPILED = compiled(GEGLU)
