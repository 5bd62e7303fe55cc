"""Gated activations in CUDA C++: how the kernels of gated.cuh's operators are launched."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.core import Implementation
from weft.ops._shared.elementwise import Walk, contiguous_like


def implementation(operator: str, file: Path) -> Implementation:
    """An operator's way in CUDA C++: ``file`` has its kernels, NAME_forward and NAME_backward."""
    walk = Walk(file, f"{operator}_forward", f"{operator}_backward")

    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = contiguous_like(gate)
        walk.run(f"{operator}_forward", (gate.contiguous(), up.contiguous(), y))
        return y

    def backward(
        grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = contiguous_like(gate), contiguous_like(up)
        tensors = (grad.contiguous(), gate.contiguous(), up.contiguous(), *both)
        walk.run(f"{operator}_backward", tensors)
        return both

    return Implementation(
        operator=operator,
        name="cuda",
        backend="cuda",
        forward=forward,
        backward=backward,
        specimens=walk.specimens,
        idea="one 16-byte vector a thread and tensor",
    )
