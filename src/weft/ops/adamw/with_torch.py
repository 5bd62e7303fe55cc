"""AdamW by PyTorch: its fused kernel on a GPU, its functional form on a CPU.

The fused kernel writes a scaled gradient back, so clipping scales a copy, which is one more pass.
"""

from __future__ import annotations

import torch

from weft.core import YES, Case, Implementation, Support, no
from weft.ops.adamw.spec import STOCHASTIC
from weft.ops.adamw.step import Numbers, StepLists, clip_factor, forward_of

LARGE_LR = 1e-3  # at lower rates an error in the fifth digit of the update is lost in rounding


def run(lists: StepLists, numbers: Numbers) -> None:
    """Take one step over the lists. A step that is a number costs one kernel that writes it to the device."""
    params, grads, exp_avgs, exp_avg_sqs, masters = lists
    assert not masters and not numbers.stochastic
    if not params:
        return
    scaled = list(grads)
    if numbers.clips:
        # torch's own clipping rounds each norm to the gradients' dtype; float32 keeps the digits of a 16-bit
        # one.
        norms = torch._foreach_norm(scaled, 2, dtype=torch.float32)
        factor = clip_factor([torch.stack(norms)], numbers.max_norm)
        scaled = list(torch._foreach_mul(scaled, factor))
    n, device = numbers, params[0].device
    if device.type == "cpu":
        from torch.optim.adamw import adamw

        before = float(n.step) - 1  # torch increments it
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
        # The fused kernel reads the step from device memory, and expects float32.
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
        return no("torch's AdamW has no float32 master of a half-precision parameter")
    if case.params.get("rounding") == STOCHASTIC:
        return no("torch's AdamW does not round stochastically")
    if len({i.dtype for i in case.inputs}) > 1:
        return no("torch's AdamW needs parameter, gradient and averages in one dtype")
    if device == "cuda" and len({i.layout for i in case.inputs} | {"contiguous"}) > 1:
        return no("torch's fused AdamW needs parameter, gradient and averages in one layout")
    rate = case.params.get("lr", 0.0)  # `begin` asks before the numbers are known
    if device == "cuda" and case.dtype == "float32" and rate > LARGE_LR:  # type: ignore[operator]
        return no(
            "torch's fused AdamW computes 1 - beta^step in float32, which leaves four digits: at so "
            "large a rate the parameter exceeds the tolerance (27 times, measured)"
        )
    return YES


IMPLEMENTATION = Implementation(
    operator="adamw",
    backend="torch",
    forward=forward_of(run),
    supports=supports,
    idea="torch._fused_adamw_",
)
