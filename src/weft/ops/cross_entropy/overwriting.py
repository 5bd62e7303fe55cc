"""The gradient written over the logits: what a functional operator of torch.library cannot say."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from weft.ops._shared.public import call


def can(logits: torch.Tensor, impl: str) -> bool:
    """Whether ``impl`` writes into logits as they lie: its module has a ``backward_into``."""
    return impl in ("triton", "cuda") and logits.stride(1) == 1 and logits.stride(0) > 0


class Overwriting(torch.autograd.Function):
    """(logits, targets, params, impl) -> losses, whose backward leaves its answer in the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, params: dict[str, Any], impl: str
    ) -> torch.Tensor:
        losses, lse = call("cross_entropy", (logits, targets), params, impl)
        ctx.save_for_backward(logits, targets, lse)
        ctx.params, ctx.impl = params, impl
        return losses  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        logits, targets, lse = ctx.saved_tensors
        module = import_module(f"weft.ops.cross_entropy.with_{ctx.impl}")
        memory = logits.detach()
        module.backward_into(memory, grads[0], memory, targets, lse, **ctx.params)
        torch.autograd.graph.increment_version(logits)  # a second backward is told
        return memory, None, None, None
