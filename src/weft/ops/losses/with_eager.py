"""The losses composed by hand from torch calls, in float32, and ``torch.compile`` of that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops.losses.spec import LossOptions, weight_gradient_dtype

ThreeTensors = tuple[Tensor, Tensor, Tensor]


def eager_losses(x: Tensor, targets: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return (losses, lse) of float32 logits; both are NaN if a target is out of range."""
    ignore_index, label_smoothing, z_loss = options
    ignored, in_range, safe_targets = _classify_targets(targets, ignore_index, x.shape[1])
    x = x.masked_fill(ignored[:, None], 0.0)
    top = x.amax(-1, keepdim=True).detach()
    lse = (top + torch.log(torch.exp(x - top).sum(-1, keepdim=True))).squeeze(-1)
    # As the kernels do, which cannot raise.
    lse = torch.where(in_range, lse, torch.nan)
    losses = lse - (1 - label_smoothing) * x.gather(1, safe_targets[:, None]).squeeze(-1)
    if label_smoothing:
        losses = losses - label_smoothing * x.mean(-1)
    if z_loss:
        losses = losses + float(z_loss) * lse.square()
    return losses.masked_fill(ignored, 0.0), lse.masked_fill(ignored, 0.0)


def eager_gradient(grad: Tensor, x: Tensor, targets: Tensor, lse: Tensor, options: LossOptions) -> Tensor:
    """Return the gradient of sum(grad losses) with respect to float32 logits ``x``."""
    ignore_index, label_smoothing, z_loss = options
    ignored, _, safe_targets = _classify_targets(targets, ignore_index, x.shape[1])
    dx = (grad * (1 + 2 * float(z_loss) * lse))[:, None] * torch.exp(x - lse[:, None])
    if label_smoothing:
        dx = dx - (grad * (label_smoothing / x.shape[1]))[:, None]
    dx = dx.scatter_add(1, safe_targets[:, None], (grad * -(1 - label_smoothing))[:, None])
    return dx.masked_fill(ignored[:, None], 0.0)


def _classify_targets(targets: Tensor, ignore_index: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ignored, in range or ignored, a column in range for each row)."""
    ignored = targets == ignore_index
    in_range = (targets >= 0) & (targets < columns)
    return ignored, in_range | ignored, targets.masked_fill(ignored | ~in_range, 0)


def cross_entropy_forward(logits: Tensor, targets: Tensor, **params: Any) -> tuple[Tensor, Tensor]:
    return eager_losses(logits.float(), targets, LossOptions(**params))


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, **params: Any
) -> tuple[Tensor]:
    dx = eager_gradient(grad, logits.float(), targets, lse, LossOptions(**params))
    return (dx.to(logits.dtype).contiguous(),)


def linear_cross_entropy_forward(x: Tensor, weight: Tensor, targets: Tensor, **params: Any) -> ThreeTensors:
    logits = (x @ weight.T).float()
    options = LossOptions(**params)
    losses, lse = eager_losses(logits, targets, options)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return losses.sum(), x.new_empty(0), x.new_empty(0)  # autograd computes the gradients
    ones = torch.ones_like(lse)
    gradient = eager_gradient(ones, logits, targets, lse, options).to(x.dtype)
    return losses.sum(), gradient @ weight, (gradient.T @ x).to(weight_gradient_dtype(x.dtype))


def linear_cross_entropy_backward(
    grad: Tensor, dx: Tensor, dweight: Tensor, **unused: Any
) -> tuple[Tensor, Tensor]:
    return (dx.float() * grad).to(dx.dtype), (dweight.float() * grad).to(dx.dtype)


CROSS_ENTROPY = Implementation(
    operator="cross_entropy",
    backend="eager",
    forward=cross_entropy_forward,
    backward=cross_entropy_backward,
    idea="max, sub, exp, sum, log, gather",
)
CROSS_ENTROPY_COMPILED = compiled(CROSS_ENTROPY)

LINEAR_CROSS_ENTROPY = Implementation(
    operator="linear_cross_entropy",
    backend="eager",
    forward=linear_cross_entropy_forward,
    backward=linear_cross_entropy_backward,
    idea="all logits at once, float32 between the products",
)
LINEAR_CROSS_ENTROPY_COMPILED = replace(
    compiled(LINEAR_CROSS_ENTROPY), backward=linear_cross_entropy_backward
)
