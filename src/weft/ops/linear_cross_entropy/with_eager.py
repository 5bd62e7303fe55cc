"""The LM head and its loss composed by hand, all logits at once; ``compile`` fuses what it can."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._shared.cross_entropy import eager_gradient, eager_losses

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensors:
    logits = (x @ weight.T).float()
    rest = (ignore_index, label_smoothing, z_loss)
    losses, lse = eager_losses(logits, targets, *rest)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return losses.sum(), x.new_empty(0), x.new_empty(0)  # autograd has it from here
    ones = torch.ones_like(lse)
    gradient = eager_gradient(ones, logits, targets, lse, *rest).to(x.dtype)
    return losses.sum(), gradient @ weight, (gradient.T @ x).float()


def backward(
    grad: torch.Tensor,
    dx: torch.Tensor,
    dweight: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (dx.float() * grad).to(dx.dtype), (dweight * grad).to(dx.dtype)


IMPLEMENTATION = Implementation(
    operator="linear_cross_entropy",
    name="eager",
    backend="eager",
    forward=forward,
    backward=backward,
    idea="all logits at once, float32 between the products",
)
COMPILED = replace(compiled(IMPLEMENTATION), backward=backward)
