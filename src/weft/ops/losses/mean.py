"""Mean cross entropy by our own kernels, as one autograd function.

The reduction of the rows' losses by PyTorch's calls, which are a comparison, two sums and a quotient, costs
the host more than the losses do. Here one launch of one block reduces them, and its gradient is a quotient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from weft.core import registry
from weft.dispatch import devices
from weft.dispatch.operator import apply_without_checks, can_skip_dispatcher, refuse_double_backward

MAX_ROWS = 1 << 16  # one block reads them all: about 30 us of one SM at the most
BACKENDS = ("triton", "cuda")


def has_mean(logits: torch.Tensor, targets: torch.Tensor, impl: str) -> bool:
    """True if :func:`mean_cross_entropy` takes this call."""
    return (
        impl in BACKENDS
        and 0 < logits.shape[0] <= MAX_ROWS
        and logits.device.type in ("cuda", "cpu")
        and can_skip_dispatcher((logits, targets))
    )


def mean_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, params: dict[str, Any], impl: str
) -> torch.Tensor:
    """Return the mean loss of the rows whose target is not ``ignore_index``: a float32 scalar.

    The arguments are validated, and are those of a call that passes :func:`has_mean`.
    """
    needs_grad = torch.is_grad_enabled() and logits.requires_grad
    function = _apply if needs_grad else _forward_alone
    return devices.call_on(logits.get_device(), function, logits, targets, params, impl)  # type: ignore[no-any-return]


def _forward_alone(
    logits: torch.Tensor, targets: torch.Tensor, params: dict[str, Any], impl: str
) -> torch.Tensor:
    forward, _, mean_of_rows = _functions(impl)
    losses, _ = forward(logits, targets, **params)
    return mean_of_rows(losses, targets, params["ignore_index"])[0]  # type: ignore[no-any-return]


class _MeanCrossEntropy(torch.autograd.Function):
    """(logits, targets, params, impl) -> mean loss."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, params: dict[str, Any], impl: str
    ) -> torch.Tensor:
        forward, _, mean_of_rows = _functions(impl)
        losses, lse = forward(logits, targets, **params)
        mean, count = mean_of_rows(losses, targets, params["ignore_index"])
        ctx.save_for_backward(logits, targets, lse, count)
        ctx.params, ctx.impl = params, impl
        return mean  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        refuse_double_backward("cross_entropy")
        logits, targets, lse, count = ctx.saved_tensors
        grad = (grads[0] / count).expand(logits.shape[0])
        arguments = (grad, logits, targets, lse)
        if can_skip_dispatcher(arguments):
            (dx,) = _functions(ctx.impl)[1](*arguments, **ctx.params)
        else:
            dx = torch.ops.weft.cross_entropy_backward(*arguments, *ctx.params.values(), ctx.impl)
        return dx, None, None, None


_apply = apply_without_checks(_MeanCrossEntropy)


@cache
def _functions(impl: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return forward, backward and mean of an implementation."""
    implementation = registry.implementation("cross_entropy", impl)
    assert implementation.backward is not None
    module = import_module(f"weft.ops.losses.with_{impl}")
    return implementation.forward, implementation.backward, module.mean_of_rows
