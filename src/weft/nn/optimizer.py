"""``AdamW``: torch's optimizer, a whole list of parameters in one launch, clipping folded in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft import ops
from weft.core import WeftError
from weft.nn._common import refuse

# What torch's own has besides. foreach and fused name torch's implementations; impl= names Weft's.
ONLY = {"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False}
TENSORS = ("params", "grads", "exp_avgs", "exp_avg_sqs")
Lists = dict[str, list[Any]]


class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay (arXiv:1711.05101), by ``weft.ops.adamw``.

    Arguments, groups and state dict are ``torch.optim.AdamW``'s: one may load what the other saved,
    and go on.

    Args:
        params, lr, betas, eps, weight_decay: torch's.
        max_norm: where given, gradients are scaled so that the norm of them all is at most this,
            as ``torch.nn.utils.clip_grad_norm_`` before the step would. It is no part of the state
            dict. With one group, dtype and device the scale is folded into the update, and the
            gradients are read only; else they are scaled in place, as torch does.
        impl: the implementation that ``weft.ops.adamw`` is to use; None is its choice.

    Raises:
        WeftError: ``amsgrad``, ``maximize``, ``capturable``, ``differentiable``, ``foreach`` or
            ``fused``, here or in a state dict; ``max_norm`` not above 0.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_norm: float | None = None,
        impl: str | None = None,
    ) -> None:
        refuse("AdamW", locals(), ONLY, "torch.optim.AdamW has it")
        refuse("AdamW", locals(), {"foreach": None, "fused": None}, "impl= names one of Weft's")
        if max_norm is not None and not max_norm > 0.0:
            raise WeftError("AdamW: max_norm", expected="None or above 0", got=max_norm)
        self.max_norm, self.impl = max_norm, impl
        super().__init__(params, lr, betas, eps, weight_decay)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this or ``torch.optim.AdamW`` saved; what is refused raises first."""
        for group in state_dict["param_groups"]:
            refuse("AdamW: the state dict", {**ONLY, **group}, ONLY, "torch.optim.AdamW has it")
        super().load_state_dict(state_dict)
        for group in self.param_groups:  # which of its ways torch took is no matter here
            group["foreach"] = group["fused"] = None
        for state in self.state.values():  # and its fused way counts steps on the device
            state["step"] = state["step"].cpu()

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's stub has an overload for each kind of closure
        self, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Update every parameter that has a gradient; return what ``closure`` returns, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = list(self._parts())
        folded = self.max_norm if len(parts) == 1 else None
        if self.max_norm is not None and len(parts) > 1:
            every = [p for _, _, lists in parts for p in lists["params"]]
            torch.nn.utils.clip_grad_norm_(every, self.max_norm)
        for group, step, lists in parts:
            ops.adamw(
                *(lists[name] for name in TENSORS),
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=step,
                max_norm=folded,
                impl=self.impl,
            )
        return loss

    def _parts(self) -> Iterator[tuple[dict[str, Any], int, Lists]]:
        """Lists that one launch may take: of one group, device, dtype and number of steps."""
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if not with_gradient:
                continue
            states = [self._begun(p) for p in with_gradient]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            counts = map(int, torch.stack(steps).tolist())  # one read of them all
            kinds = [(p.device, p.dtype, n) for p, n in zip(with_gradient, counts, strict=True)]
            for kind in dict.fromkeys(kinds):
                rows = [i for i, k in enumerate(kinds) if k == kind]
                lists: Lists = {
                    "params": [with_gradient[i] for i in rows],
                    "grads": [with_gradient[i].grad for i in rows],
                    "exp_avgs": [states[i]["exp_avg"] for i in rows],
                    "exp_avg_sqs": [states[i]["exp_avg_sq"] for i in rows],
                }
                yield group, kind[2], lists

    def _begun(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter's state, in torch's layout; made at its first step."""
        state: dict[str, torch.Tensor] = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state
