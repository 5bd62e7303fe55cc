"""What one step is asked for: the numbers, and a step over lists as an implementation's forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.ops.adamw.spec import CLIP_EPS, NEAREST, NO_CLIP, STOCHASTIC

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Numbers:
    """The scalars of a step. ``step`` counts from 1, as a number or a one-element tensor on the
    parameters' device; ``max_norm`` is infinite where nothing is clipped."""

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
        """lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t), for a step that is a number."""
        assert not isinstance(self.step, torch.Tensor)
        size = self.lr / (1 - self.beta1**self.step)
        return size, (1 - self.beta2**self.step) ** -0.5


# run(params, grads, exp_avgs, exp_avg_sqs, masters (or none), numbers)
Run = Callable[..., None]
Begun = Callable[[Numbers], None]  # the rest of a step whose lists were looked at


def forward_of(run: Run) -> Callable[..., None]:
    """An implementation's forward, one parameter's step, from its step over lists."""

    def forward(*inputs: torch.Tensor, **params: Any) -> None:
        param, grad, exp_avg, exp_avg_sq, *master = inputs
        run([param], [grad], [exp_avg], [exp_avg_sq], master, Numbers(**params))

    return forward


def clip_factor(grads: Tensors, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / (norm + 1e-6)) over all gradients, by torch calls, on their device."""
    norms = [g.float().square().sum() for g in grads]
    total = torch.stack(norms).sum().sqrt()
    return (max_norm / (total + CLIP_EPS)).clamp(max=1.0)
