"""Cross entropy composed by hand from torch calls, in float32; ``compile`` fuses them."""

from __future__ import annotations

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._shared.cross_entropy import eager_gradient, eager_losses


def forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    return eager_losses(logits.float(), targets, ignore_index, label_smoothing, z_loss)


def backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor]:
    x, rest = logits.float(), (ignore_index, label_smoothing, z_loss)
    return (eager_gradient(grad, x, targets, lse, *rest).to(logits.dtype).contiguous(),)


IMPLEMENTATION = Implementation(
    operator="cross_entropy",
    name="eager",
    backend="eager",
    forward=forward,
    backward=backward,
    idea="max, sub, exp, sum, log, gather",
)
COMPILED = compiled(IMPLEMENTATION)
