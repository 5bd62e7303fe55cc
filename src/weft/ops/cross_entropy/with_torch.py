"""Cross entropy by the library: log_softmax in float32, then nll_loss, as F.cross_entropy does."""

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
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    losses = torch.nn.functional.nll_loss(
        log_p, targets, ignore_index=ignore_index, reduction="none"
    )
    ignored = targets == ignore_index
    if label_smoothing:
        smooth = (-log_p.mean(-1)).masked_fill(ignored, 0.0)
        losses = (1 - label_smoothing) * losses + label_smoothing * smooth
    # x - log p is the log-sum-exp at any column; at the largest nothing is infinite.
    at = log_p.detach().argmax(-1, keepdim=True)
    lse = (logits.gather(1, at).float() - log_p.gather(1, at)).squeeze(-1)
    lse = lse.masked_fill(ignored, 0.0)
    if z_loss:
        losses = losses + z_loss * lse.square()
    return losses, lse


IMPLEMENTATION = Implementation(
    operator="cross_entropy",
    name="torch",
    backend="torch",
    forward=forward,
    idea="log_softmax, nll_loss",
)
