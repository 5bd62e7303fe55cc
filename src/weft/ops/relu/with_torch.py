"""ReLU by the library: one kernel each way."""

from __future__ import annotations

import torch

from weft.core import Implementation


def forward(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


IMPLEMENTATION = Implementation(
    operator="relu", name="torch", backend="torch", forward=forward, idea="torch.relu"
)
