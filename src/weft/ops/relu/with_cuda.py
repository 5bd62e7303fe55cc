"""ReLU in CUDA C++: one 16-byte vector a thread; see relu.cu."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.core import Implementation
from weft.ops._shared.elementwise import Walk
from weft.ops._shared.layout import aligned_with, dense

WALK = Walk(Path(__file__).with_name("relu.cu"), "relu_forward", "relu_backward")


def forward(x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    y = torch.empty_like(x)
    WALK.run("relu_forward", (x, y))
    return y


def backward(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    y = dense(y)
    dx = torch.empty_like(y)
    WALK.run("relu_backward", (aligned_with(grad, y), y, dx))
    return (dx,)


IMPLEMENTATION = Implementation(
    operator="relu",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=WALK.specimens,
    idea="one 16-byte vector a thread",
)
