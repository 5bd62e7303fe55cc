"""ReLU composed by hand from torch calls: a comparison and a choice; ``compile`` fuses them."""

from __future__ import annotations

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation


def forward(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x <= 0, 0.0, x)


IMPLEMENTATION = Implementation(
    operator="relu", name="eager", backend="eager", forward=forward, idea="two torch calls"
)
COMPILED = compiled(IMPLEMENTATION)
