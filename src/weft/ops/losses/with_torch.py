"""The losses by the library: log_softmax in float32 and nll_loss, which ``F.cross_entropy`` calls.

``cross_entropy`` returns no log-sum-exp here: PyTorch's own does not compute one, and is not slowed down for
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.core import YES, Case, Implementation, Support
from weft.core.implementation import with_invariant
from weft.ops._common.invariant_rows import supports_unsplit_sums
from weft.ops.losses.spec import LossOptions, weight_gradient_dtype
from weft.ops.losses.with_eager import ThreeTensors, linear_cross_entropy_backward

REDUCTIONS = {"mean": 1, "sum": 2}  # ATen's numbers, which PyTorch's annotations call text
_nll_loss: Any = torch._C._nn.nll_loss_nd


def cross_entropy_forward(logits: Tensor, targets: Tensor, **params: Any) -> tuple[Tensor]:
    ignore_index, label_smoothing, z_loss = LossOptions(**params)
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    losses = torch.nn.functional.nll_loss(log_p, targets, ignore_index=ignore_index, reduction="none")
    if label_smoothing:
        smooth = (-log_p.mean(-1)).masked_fill(targets == ignore_index, 0.0)
        losses = (1 - label_smoothing) * losses + label_smoothing * smooth
    if z_loss:
        # x - log p is the log-sum-exp at any column; at the largest logit both are finite.
        at = log_p.detach().argmax(-1, keepdim=True)
        lse = (logits.gather(1, at).float() - log_p.gather(1, at)).squeeze(-1)
        losses = losses + float(z_loss) * lse.masked_fill(targets == ignore_index, 0.0).square()
    return (losses,)


def reduced_cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Return the mean or sum of the losses without smoothing: a float32 scalar."""
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    return torch.nn.functional.nll_loss(log_p, targets, ignore_index=ignore_index, reduction=reduction)


def reduced_cross_entropy_function(ignore_index: int, reduction: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return :func:`reduced_cross_entropy` of logits and targets, by the functions that PyTorch's call."""
    log_softmax, nll_loss, kind = torch.log_softmax, _nll_loss, REDUCTIONS[reduction]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nll_loss(log_softmax(logits, -1, dtype=torch.float32), targets, None, kind, ignore_index)  # type: ignore[no-any-return]

    return loss


def reduced_loss_of_product(ignore_index: int, reduction: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the loss of ``x @ weight.T``, without smoothing and z-loss, of x, weight and targets.

    PyTorch divides the sum by the number of rows itself, as ``linear_cross_entropy`` does with the sum of
    :func:`linear_cross_entropy_forward`.
    """
    linear, log_softmax, nll_loss = torch._C._nn.linear, torch.log_softmax, _nll_loss
    kind = REDUCTIONS[reduction]

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        log_p = log_softmax(linear(x, weight), -1, dtype=torch.float32)
        return nll_loss(log_p, targets, None, kind, ignore_index)  # type: ignore[no-any-return]

    return loss


def _summed_loss(x: Tensor, weight: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    ignore_index, label_smoothing, z_loss = options
    logits = torch.nn.functional.linear(x, weight)
    if not (label_smoothing or z_loss):  # on a GPU log_softmax converts in its own pass, in both directions
        return reduced_cross_entropy(logits, targets, ignore_index, "sum")
    logits = logits.float()
    loss = torch.nn.functional.cross_entropy(
        logits,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    if z_loss:
        lse = torch.logsumexp(logits, -1).masked_fill(targets == ignore_index, 0.0)
        loss = loss + float(z_loss) * lse.square().sum()
    return loss


def linear_cross_entropy_forward(x: Tensor, weight: Tensor, targets: Tensor, **params: Any) -> ThreeTensors:
    options = LossOptions(**params)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        # Autograd computes the gradients.
        return _summed_loss(x, weight, targets, options), x.new_empty(0), x.new_empty(0)
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = _summed_loss(leaves[0], leaves[1], targets, options)
        dx, dweight = torch.autograd.grad(loss, leaves)
    # A gradient has its leaf's strides; the operator's outputs are contiguous.
    return loss.detach(), dx.contiguous(), dweight.to(weight_gradient_dtype(x.dtype)).contiguous()


def _supports_invariant(case: Case, device: str) -> Support:
    # log_softmax computes a row by itself on a CPU; the smoothing's mean is a plain reduction.
    return supports_unsplit_sums(case, device) if case.params.get("label_smoothing") else YES


CROSS_ENTROPY = with_invariant(
    Implementation(
        operator="cross_entropy",
        backend="torch",
        forward=cross_entropy_forward,
        outputs=1,
        idea="log_softmax, nll_loss",
    ),
    devices=("cpu",),
    supports=_supports_invariant,
)

LINEAR_CROSS_ENTROPY = Implementation(
    operator="linear_cross_entropy",
    backend="torch",
    forward=linear_cross_entropy_forward,
    backward=linear_cross_entropy_backward,
    idea="F.linear, F.cross_entropy, autograd",
)
