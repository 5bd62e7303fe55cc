"""AdamW composed of about fifteen torch calls for each parameter; ``compile`` fuses them."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.backends.inductor import compiled
from weft.core import YES, Case, Implementation, Support, no
from weft.ops.adamw.spec import STOCHASTIC
from weft.ops.adamw.step import Numbers, StepLists, clip_factor, forward_of


def stochastic(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Round float32 to bfloat16 stochastically: add 16 random bits below the cut, then truncate."""
    generator = torch.Generator(x.device)
    generator.manual_seed(seed)
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    cut = ((x.view(torch.int32) + noise) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)


def run(lists: StepLists, numbers: Numbers) -> None:
    """Step one parameter after another."""
    params, grads, exp_avgs, exp_avg_sqs, masters = lists
    clip = clip_factor(grads, numbers.max_norm) if numbers.clips and grads else None
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        m, v = exp_avgs[i], exp_avg_sqs[i]
        master = masters[i] if masters else None
        seed = numbers.seed * 1_000_003 + i
        p = _update(master if master is not None else param, grad, m, v, clip, numbers)
        param.copy_(stochastic(p, seed) if numbers.stochastic else p)
        if master is not None:
            master.copy_(p)


def _update(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    clip: torch.Tensor | None,
    n: Numbers,
) -> torch.Tensor:
    """Return the parameter after the step in float32; overwrite the two averages."""
    g = grad.float() if clip is None else grad.float() * clip
    m = n.beta1 * exp_avg.float() + (1 - n.beta1) * g
    v = n.beta2 * exp_avg_sq.float() + (1 - n.beta2) * g * g
    # In float64 if the step is a tensor: 1 - beta2^t cancels and leaves four digits of float32.
    step = n.step.double() if isinstance(n.step, torch.Tensor) else n.step
    size, widen = n.lr / (1 - n.beta1**step), (1 - n.beta2**step) ** -0.5
    move = m / (v.sqrt() * widen + n.eps) * size
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    return param.float() * (1 - n.lr * n.weight_decay) - move


def compiles(case: Case, device: str) -> Support:
    if case.params.get("rounding") == STOCHASTIC:
        return no("torch.compile cannot trace a torch.Generator; impl='triton', 'cuda' or 'eager'")
    return YES


IMPLEMENTATION = Implementation(
    operator="adamw",
    backend="eager",
    forward=forward_of(run),
    idea="some fifteen torch calls",
)
COMPILED = replace(compiled(IMPLEMENTATION), supports=compiles)
