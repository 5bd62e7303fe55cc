"""Scalars of one AdamW step, and what implementations over lists share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weft.ops.adamw.spec import CLIP_EPS, NEAREST, NO_CLIP, STOCHASTIC

Tensors = Sequence[torch.Tensor]


class StepLists(NamedTuple):
    """Lists of one step, one tensor for each parameter; ``masters`` may be empty."""

    params: Tensors
    grads: Tensors
    exp_avgs: Tensors
    exp_avg_sqs: Tensors
    masters: Tensors = ()


@dataclass(frozen=True, slots=True)
class Numbers:
    """Scalars of a step. ``step`` counts from 1, as a number or a one-element tensor on the parameters'
    device; ``max_norm`` is infinite if gradients are not clipped."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int | torch.Tensor
    max_norm: float = NO_CLIP
    rounding: str = NEAREST
    seed: int = 0

    @property
    def clips(self) -> bool:
        return self.max_norm != NO_CLIP

    @property
    def stochastic(self) -> bool:
        return self.rounding == STOCHASTIC

    def corrections(self) -> tuple[float, float]:
        """Return lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t), for a step that is a number."""
        assert not isinstance(self.step, torch.Tensor)
        size = self.lr / (1 - self.beta1**self.step)
        return size, (1 - self.beta2**self.step) ** -0.5


Run = Callable[[StepLists, Numbers], None]
PreparedStep = Callable[[Numbers], None]  # a step whose lists are checked and whose tables are written


def forward_of(run: Run) -> Callable[..., None]:
    """Return an implementation's forward, which steps one parameter, made of its step over lists."""

    def forward(*inputs: torch.Tensor, **params: Any) -> None:
        param, grad, exp_avg, exp_avg_sq, *master = inputs
        run(StepLists([param], [grad], [exp_avg], [exp_avg_sq], master), Numbers(**params))

    return forward


def clip_factor(grads: Tensors, max_norm: float) -> torch.Tensor:
    """Return min(1, max_norm / (norm + 1e-6)) over all gradients, computed by torch on their device."""
    norms = [g.float().square().sum() for g in grads]
    total = torch.stack(norms).sum().sqrt()
    return (max_norm / (total + CLIP_EPS)).clamp(max=1.0)
