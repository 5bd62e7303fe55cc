"""Mean cross entropy by our own kernels, as one autograd function.

The reduction of the rows' losses by PyTorch's calls, which are a comparison, two sums and a quotient, costs
the host more than the losses do. Here one launch of one block reduces them, and its gradient is a quotient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from weft.core import registry
from weft.dispatch import devices
from weft.dispatch.autograd_context import apply_without_checks, refuse_double_backward
from weft.dispatch.operator import backward_of, can_skip_dispatcher
from weft.dispatch.repeated_calls import Implemented, repeated_call, repeated_call_with_gradient
from weft.ops._common.prepared import are_repeatable
from weft.ops.losses.spec import launch_key, mean_key

MAX_ROWS = 1 << 16  # one block reads them all: about 30 us of one SM at the most
BACKENDS = ("triton", "cuda")


def has_mean(logits: torch.Tensor, targets: torch.Tensor, impl: str) -> bool:
    """True if :func:`mean_cross_entropy` takes this call."""
    return (
        impl in BACKENDS
        and 0 < logits.shape[0] <= MAX_ROWS
        and (logits.is_cuda or logits.is_cpu)
        and can_skip_dispatcher((logits, targets))
    )


def generate_mean(
    inputs: tuple[torch.Tensor, torch.Tensor], params: dict[str, Any], impl: str
) -> Callable[..., Any] | None:
    """Return the function of logits and targets that repeats a call that passes :func:`has_mean`, or None.

    It returns the mean loss and, where a gradient is wanted, what the backward needs, as ``_mean_of_losses``.
    """
    if not (torch.is_grad_enabled() and inputs[0].requires_grad):
        forward = partial(_forward_alone, params=dict(params), impl=impl)
        return repeated_call(forward, inputs, partial(devices.call_on, devices.index_of(inputs), forward))
    kernels = Implemented(
        name="cross_entropy",
        impl=impl,
        params=dict(params),
        forward=partial(_mean_of_losses, params=dict(params), impl=impl),
        backward=partial(_backward, backward_of("cross_entropy", impl), dict(params)),
        dispatched_backward=partial(_dispatched_backward, dict(params), impl),
        saved=lambda tensors, outputs: (*tensors, *outputs[1:]),
        can_skip_dispatcher=can_skip_dispatcher,
        positions=(0,),
        num_inputs=2,
        outputs=3,
    )
    return repeated_call_with_gradient(kernels, inputs)


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
    return _mean_of_losses(logits, targets, params, impl)[0]


def _mean_of_losses(
    logits: torch.Tensor, targets: torch.Tensor, params: dict[str, Any], impl: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean loss, the log-sum-exp of each row, and the number of rows that are not ignored.

    The two launches of an earlier call of this kind are repeated together.
    """
    module = _module(impl)
    key = ("losses and mean", logits.shape, logits.dtype, logits.get_device(), *params.values())
    launches = module.LAUNCHES.get(key)
    is_repeatable = are_repeatable(logits, targets)
    if launches is not None and is_repeatable:
        launch_losses, launch_mean = launches
        losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        lse, mean = torch.empty_like(losses), losses.new_empty(())
        count = torch.empty_like(mean)
        targets_address, losses_address = targets.data_ptr(), losses.data_ptr()
        launch_losses(logits.data_ptr(), targets_address, losses_address, lse.data_ptr())
        launch_mean(losses_address, targets_address, mean.data_ptr(), count.data_ptr())
        return mean, lse, count
    losses, lse = registry.implementation("cross_entropy", impl).forward(logits, targets, **params)
    mean, count = module.mean_of_rows(losses, targets, params["ignore_index"])
    if is_repeatable:  # both have stored their launches, unless the backend prepares none
        keys = (
            launch_key(logits, targets, (False,), params),
            mean_key(losses, targets, params["ignore_index"]),
        )
        module.LAUNCHES.store(key, tuple(map(module.LAUNCHES.get, keys)))
    return mean, lse, count


class _MeanCrossEntropy(torch.autograd.Function):
    """(logits, targets, params, impl) -> mean loss."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, params: dict[str, Any], impl: str
    ) -> torch.Tensor:
        mean, lse, count = _mean_of_losses(logits, targets, params, impl)
        ctx.save_for_backward(logits, targets, lse, count)
        ctx.params, ctx.impl = params, impl
        return mean

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        refuse_double_backward("cross_entropy")
        logits, targets, lse, count = ctx.saved_tensors
        tensors = (grads[0], logits, targets, lse, count)
        if can_skip_dispatcher(tensors):
            (dx,) = _backward(backward_of("cross_entropy", ctx.impl), ctx.params, *tensors)
        else:
            (dx,) = _dispatched_backward(ctx.params, ctx.impl, *tensors)
        return dx, None, None, None


def _backward(
    backward: Any,
    params: dict[str, Any],
    grad: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    count: torch.Tensor,
) -> tuple[torch.Tensor]:
    each_row = (grad / count).expand(logits.shape[0])
    return backward(each_row, logits, targets, lse, **params)  # type: ignore[no-any-return]


def _dispatched_backward(
    params: dict[str, Any],
    impl: str,
    grad: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    count: torch.Tensor,
) -> tuple[torch.Tensor]:
    each_row = (grad / count).expand(logits.shape[0])
    arguments = (each_row, logits, targets, lse, *params.values(), impl)
    return (torch.ops.weft.cross_entropy_backward(*arguments),)


_apply = apply_without_checks(_MeanCrossEntropy)


@cache
def _module(impl: str) -> Any:
    return import_module(f"weft.ops.losses.with_{impl}")
