"""AdamW by the library: its fused kernel on a GPU, its functional form on a CPU.

The fused kernel writes a scaled gradient back, so clipping scales a copy, one more pass.
"""

from __future__ import annotations

import torch

from weft.core import YES, Case, Implementation, Support, no
from weft.ops.adamw.lists import Numbers, Tensors, clip_factor, forward_of
from weft.ops.adamw.spec import STOCHASTIC

LARGE = 1e-3  # of a learning rate: below, an error in the move's fifth digit is lost in rounding


def run(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors,
    numbers: Numbers,
) -> None:
    """One step over the lists. The step as a number costs one kernel that writes it."""
    assert not masters and not numbers.stochastic
    if not params:
        return
    scaled = list(grads)
    if numbers.clips:
        norms = torch._foreach_norm(scaled, 2, dtype=torch.float32)
        factor = clip_factor([torch.stack(norms)], numbers.max_norm)
        scaled = list(torch._foreach_mul(scaled, factor))
    n, device = numbers, params[0].device
    if device.type == "cpu":
        from torch.optim.adamw import adamw

        before = float(n.step) - 1  # which it counts up
        steps = [torch.tensor(before) for _ in params]
        adamw(
            list(params),
            scaled,
            list(exp_avgs),
            list(exp_avg_sqs),
            [],
            steps,
            foreach=False,
            amsgrad=False,
            beta1=n.beta1,
            beta2=n.beta2,
            lr=n.lr,
            weight_decay=n.weight_decay,
            eps=n.eps,
            maximize=False,
        )
        return
    step = n.step
    if not isinstance(step, torch.Tensor):
        step = torch.full((), float(step), device=device)
    torch._fused_adamw_(
        list(params),
        scaled,
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        [step.float().reshape(())] * len(params),
        lr=n.lr,
        beta1=n.beta1,
        beta2=n.beta2,
        weight_decay=n.weight_decay,
        eps=n.eps,
        amsgrad=False,
        maximize=False,
    )


def supports(case: Case, device: str) -> Support:
    if len(case.inputs) > 4:
        return no("torch's AdamW knows no float32 master of a half-precision parameter")
    if case.params.get("rounding") == STOCHASTIC:
        return no("torch's AdamW does not round stochastically")
    if len({i.dtype for i in case.inputs}) > 1:
        return no("torch's AdamW wants parameter, gradient and averages in one dtype")
    if device == "cuda" and len({i.layout for i in case.inputs} | {"contiguous"}) > 1:
        return no("torch's fused AdamW wants parameter, gradient and averages in one layout")
    rate = case.params.get("lr", 0.0)  # a call is asked about before its numbers are known
    if device == "cuda" and case.dtype == "float32" and rate > LARGE:  # type: ignore[operator]
        return no(
            "torch's fused AdamW takes 1 - beta^step in float32, which keeps four digits: at so "
            "large a rate the parameter is past the tolerance (27 times, measured)"
        )
    return YES


IMPLEMENTATION = Implementation(
    operator="adamw",
    name="torch",
    backend="torch",
    forward=forward_of(run),
    supports=supports,
    idea="torch._fused_adamw_",
)
