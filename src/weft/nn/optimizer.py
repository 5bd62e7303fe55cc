"""``AdamW``: torch's optimizer, with one launch for a whole list of parameters and fused clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft import ops
from weft.core import WeftError
from weft.nn._common import refuse_unsupported

# Only these values are supported. foreach and fused select torch's implementations; impl= Weft's.
SUPPORTED = {"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False}
TENSORS = ("params", "grads", "exp_avgs", "exp_avg_sqs")
TensorLists = dict[str, list[Any]]


class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay (arXiv:1711.05101), by ``weft.ops.adamw``.

    Arguments, groups and state dict are those of ``torch.optim.AdamW``: each can load the other's state
    and continue.

    Args:
        params, lr, betas, eps, weight_decay: as in torch.
        max_norm: scale the gradients so that the norm of all of them is at most this, as
            ``torch.nn.utils.clip_grad_norm_`` before the step would; None: no clipping. It is not in the
            state dict. With one group, dtype and device the scale is fused into the update and the
            gradients are read only; otherwise they are scaled in place, as torch does.
        impl: implementation of ``weft.ops.adamw``; None leaves the choice to dispatch.

    Raises:
        WeftError: ``amsgrad``, ``maximize``, ``capturable``, ``differentiable``, ``foreach`` or
            ``fused``, as an argument or in a state dict; ``max_norm`` not above 0.
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
        refuse_unsupported("AdamW", locals(), SUPPORTED, "use torch.optim.AdamW for it")
        selects_torch = {"foreach": None, "fused": None}
        refuse_unsupported("AdamW", locals(), selects_torch, "impl= selects one of Weft's")
        if max_norm is not None and not max_norm > 0.0:
            raise WeftError("AdamW: max_norm", expected="None or above 0", got=max_norm)
        self.max_norm, self.impl = max_norm, impl
        super().__init__(params, lr, betas, eps, weight_decay)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of ``torch.optim.AdamW``; unsupported options raise first."""
        for group in state_dict["param_groups"]:
            options = {**SUPPORTED, **group}
            refuse_unsupported("AdamW: the state dict", options, SUPPORTED, "use torch.optim.AdamW for it")
        super().load_state_dict(state_dict)
        for group in self.param_groups:  # torch's choice of an implementation has no meaning here
            group["foreach"] = group["fused"] = None
        for state in self.state.values():  # torch's fused implementation counts steps on the device
            state["step"] = state["step"].cpu()

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's stub has an overload for each kind of closure
        self, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Update every parameter that has a gradient; return the result of ``closure``, if any."""
        loss = None
        if closure is not None:
            # torch's contract: the closure may call backward, although the step itself runs without
            # gradients.
            with torch.enable_grad():
                loss = closure()
        launches = list(self._launches())
        # A launch computes the norm of its own list: with one launch that is the norm of all gradients.
        fused_max_norm = self.max_norm if len(launches) == 1 else None
        if self.max_norm is not None and len(launches) > 1:
            # One launch sees the norm of its own gradients only: clip all of them before.
            params = [p for _, _, lists in launches for p in lists["params"]]
            torch.nn.utils.clip_grad_norm_(params, self.max_norm)
        for group, step, lists in launches:
            ops.adamw(
                *(lists[name] for name in TENSORS),
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=step,
                max_norm=fused_max_norm,
                impl=self.impl,
            )
        return loss

    def _launches(self) -> Iterator[tuple[dict[str, Any], int, TensorLists]]:
        """Yield lists that one launch can update: of one group, device, dtype and number of steps."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            states = [self._state_of(p) for p in params]
            steps = [state["step"] for state in states]
            # The steps are CPU tensors, as torch saves them.
            torch._foreach_add_(steps, 1)
            counts = map(int, torch.stack(steps).tolist())  # one copy instead of one per parameter
            # Parameters that had no gradient in some steps have counts of their own, and so have their bias
            # corrections.
            keys = [(p.device, p.dtype, n) for p, n in zip(params, counts, strict=True)]
            # In the order of the parameters, so that a run repeats the same launches.
            for key in dict.fromkeys(keys):
                rows = [i for i, k in enumerate(keys) if k == key]
                lists: TensorLists = {
                    "params": [params[i] for i in rows],
                    "grads": [params[i].grad for i in rows],
                    "exp_avgs": [states[i]["exp_avg"] for i in rows],
                    "exp_avg_sqs": [states[i]["exp_avg_sq"] for i in rows],
                }
                yield group, key[2], lists

    def _state_of(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a parameter's state, in torch's layout; it is created at its first step."""
        state: dict[str, torch.Tensor] = self.state[p]
        if not state:
            # A float32 tensor on the CPU, as torch.optim.AdamW stores it without capturable and fused.
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state
