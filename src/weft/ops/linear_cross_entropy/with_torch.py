"""The LM head and its loss by the library: F.linear, F.cross_entropy, and autograd for the rest."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops.linear_cross_entropy.with_eager import Tensors, backward


def loss_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    logits = torch.nn.functional.linear(x, weight).float()
    loss = torch.nn.functional.cross_entropy(
        logits,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    if z_loss:
        lse = torch.logsumexp(logits, -1).masked_fill(targets == ignore_index, 0.0)
        loss = loss + z_loss * lse.square().sum()
    return loss


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensors:
    rest = (ignore_index, label_smoothing, z_loss)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return loss_of(x, weight, targets, *rest), x.new_empty(0), x.new_empty(0)
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = loss_of(leaves[0], leaves[1], targets, *rest)
        dx, dweight = torch.autograd.grad(loss, leaves)
    # A gradient has its leaf's strides; an output is contiguous.
    return loss.detach(), dx.contiguous(), dweight.float().contiguous()


IMPLEMENTATION = Implementation(
    operator="linear_cross_entropy",
    name="torch",
    backend="torch",
    forward=forward,
    backward=backward,
    idea="F.linear, F.cross_entropy, autograd",
)
