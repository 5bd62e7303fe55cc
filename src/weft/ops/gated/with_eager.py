"""Gated activations composed of torch calls in float32; torch.compile fuses them for ``compile``."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(u))


def _implementation(operator_name: str, activation: Callable[[torch.Tensor], torch.Tensor]) -> Implementation:
    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (activation(gate.float()) * up.float()).to(gate.dtype).contiguous()

    return Implementation(
        operator=operator_name,
        backend="eager",
        forward=forward,
        idea="torch calls one after another",
    )


SWIGLU = _implementation("swiglu", silu)
GEGLU = _implementation("geglu", gelu)
SWIGLU_COMPILED = compiled(SWIGLU)
GEGLU_COMPILED = compiled(GEGLU)
