"""Dropout in CUDA C++: one 16-byte vector a thread; see dropout.cu."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.core import Implementation
from weft.ops._shared.elementwise import Walk, contiguous_like
from weft.ops._shared.philox_dropout import drops_all, rule

WALK = Walk(Path(__file__).with_name("dropout.cu"), "dropout_apply")


def forward(x: torch.Tensor, *, p: float, seed: int) -> torch.Tensor:
    y = contiguous_like(x)
    if drops_all(p):
        return y.zero_()
    WALK.run("dropout_apply", (x.contiguous(), y), seed, rule(p))
    return y


def backward(grad: torch.Tensor, *, p: float, seed: int) -> tuple[torch.Tensor]:
    return (forward(grad, p=p, seed=seed),)


IMPLEMENTATION = Implementation(
    operator="dropout",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=WALK.specimens,
    idea="one 16-byte vector a thread, random numbers made in registers",
)
