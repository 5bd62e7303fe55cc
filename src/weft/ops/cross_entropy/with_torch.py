"""Cross entropy by the library: log_softmax in float32, then nll_loss, as F.cross_entropy does.

It keeps its log-sum-exp to itself: PyTorch's own returns none, and is not to pay for one.
"""

from __future__ import annotations

import torch

from weft.core import Implementation


def forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor]:
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    losses = torch.nn.functional.nll_loss(
        log_p, targets, ignore_index=ignore_index, reduction="none"
    )
    if label_smoothing:
        smooth = (-log_p.mean(-1)).masked_fill(targets == ignore_index, 0.0)
        losses = (1 - label_smoothing) * losses + label_smoothing * smooth
    if z_loss:
        # x - log p is the log-sum-exp at any column; at the largest nothing is infinite.
        at = log_p.detach().argmax(-1, keepdim=True)
        lse = (logits.gather(1, at).float() - log_p.gather(1, at)).squeeze(-1)
        losses = losses + z_loss * lse.masked_fill(targets == ignore_index, 0.0).square()
    return (losses,)


def reduced(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, reduction: str
) -> torch.Tensor:
    """The mean or sum of the losses, with no smoothing, by the library: a float32 scalar."""
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    return torch.nn.functional.nll_loss(
        log_p, targets, ignore_index=ignore_index, reduction=reduction
    )


IMPLEMENTATION = Implementation(
    operator="cross_entropy",
    name="torch",
    backend="torch",
    forward=forward,
    outputs=1,
    idea="log_softmax, nll_loss",
)
