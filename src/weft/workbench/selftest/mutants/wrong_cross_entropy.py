"""Cross entropy with faults in both directions: smoothing, maximum, ignored rows, unzeroed buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, honest, plant

Tensors = tuple[torch.Tensor, ...]


def gradients(
    grad: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    **params: Any,
) -> Tensors:
    """Compute the library's gradients through autograd."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        losses, _ = honest("cross_entropy")(leaf, targets, **params)
    return torch.autograd.grad(losses, [leaf], grad)


def _no_smoothing(logits: torch.Tensor, targets: torch.Tensor, **params: Any) -> Tensors:
    outputs: Tensors = honest("cross_entropy")(
        logits, targets, **{**params, "label_smoothing": 0.0, "z_loss": 0.0}
    )
    return outputs


def _with(change: Callable[[torch.Tensor], torch.Tensor]) -> Forward:
    """Return the library's forward with its log-sum-exp replaced by ``change(logits)`` in float32."""

    def forward(logits: torch.Tensor, targets: torch.Tensor, **params: Any) -> Tensors:
        losses, lse = honest("cross_entropy")(logits, targets, **{**params, "z_loss": 0.0})
        ignored = targets == params.get("ignore_index", -100)
        lse_changed = change(logits.float()).masked_fill(ignored, 0.0)
        off = torch.where(lse.isfinite(), lse_changed - lse, 0.0)
        losses = losses + off + params.get("z_loss", 0.0) * lse_changed.square()
        return losses, lse_changed

    return forward


def _an_eps(x: torch.Tensor) -> torch.Tensor:
    top = x.amax(-1, keepdim=True)
    return torch.log(torch.exp(x - top).sum(-1) + 1e-3) + top[..., 0]


def _no_maximum(x: torch.Tensor) -> torch.Tensor:
    return torch.log(torch.exp(x).sum(-1))


def _losses_kept() -> Forward:
    """Add each row's loss to a buffer that is zero only at the first call."""
    buffers: dict[object, torch.Tensor] = {}

    def forward(logits: torch.Tensor, targets: torch.Tensor, **params: Any) -> Tensors:
        losses, lse = honest("cross_entropy")(logits, targets, **params)
        total = buffers.setdefault((logits.shape, logits.dtype), torch.zeros_like(losses))
        return total.add_(losses).clone(), lse

    return forward


def _gradient_kept() -> Forward:
    buffers: dict[object, torch.Tensor] = {}

    def backward(grad: torch.Tensor, logits: torch.Tensor, *more: Any, **params: Any) -> Tensors:
        (logits_grad,) = gradients(grad, logits, *more, **params)
        total = buffers.setdefault((logits.shape, logits.dtype), torch.zeros_like(logits_grad))
        return (total.add_(logits_grad).clone(),)

    return backward


def _ignored_too(
    grad: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, *more: Any, **params: Any
) -> Tensors:
    """Give ignored rows the gradient of target 0."""
    counted = targets.masked_fill(targets == params.get("ignore_index", -100), 0)
    return gradients(grad, logits, counted, *more, **{**params, "ignore_index": -100})


def _forward(row: str, what: str, title: str, killed_by: str, make: Callable[[], Forward]) -> Mutant:
    return plant(f"{row}/cross_entropy/eager/{what}", title, killed_by, make)


def _backward(row: str, what: str, title: str, killed_by: str, make: Callable[[], Forward]) -> Mutant:
    identity = f"{row}/cross_entropy/eager/{what}"
    return plant(identity, title, killed_by, lambda: honest("cross_entropy"), backward=make)


MUTANTS = (
    _forward("W10", "no-smoothing", "no smoothing and no z-loss", "error drift",
             lambda: _no_smoothing),
    _forward("W10", "an-eps", "the logarithm of the sum + 1e-3", "error drift",
             lambda: _with(_an_eps)),
    _forward("W11", "no-maximum", "a sum of exponentials as they are", "special error",
             lambda: _with(_no_maximum)),
    _forward("W15", "losses-kept", "losses added to what was there", "error drift repeats",
             _losses_kept),
    _backward("W15", "gradient-kept", "gradients added to what was there", "error drift repeats",
              _gradient_kept),
    _backward("W22", "ignored-too", "an ignored row has a gradient", "error drift",
              lambda: _ignored_too),
)  # fmt: skip
