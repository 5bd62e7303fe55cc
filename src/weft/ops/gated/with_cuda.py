"""Gated activations in CUDA C++: one 16-byte vector a thread and tensor; see gated.cuh."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.ops._common.elementwise import ElementwiseKernels
from weft.ops._common.layout import contiguous_like


def _implementation(name: str) -> Implementation:
    """Return the implementation of one member; NAME.cu has its kernels, NAME_forward and NAME_backward."""
    file = Path(__file__).with_name(f"{name}.cu")
    kernels = ElementwiseKernels(file, f"{name}_forward", f"{name}_backward")

    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = contiguous_like(gate)
        kernels.launch(f"{name}_forward", (gate.contiguous(), up.contiguous(), y))
        return y

    def backward(
        grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dgate, dup = contiguous_like(gate), contiguous_like(up)
        tensors = (grad.contiguous(), gate.contiguous(), up.contiguous(), dgate, dup)
        kernels.launch(f"{name}_backward", tensors)
        return dgate, dup

    return with_invariant(
        Implementation(
            operator=name,
            backend="cuda",
            forward=forward,
            backward=backward,
            aot_kernels=kernels.aot_kernels,
            idea="one 16-byte vector a thread and tensor",
        )
    )


SWIGLU = _implementation("swiglu")
GEGLU = _implementation("geglu")
