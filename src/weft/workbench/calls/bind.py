"""Binding of an implementation to a case's inputs: the result is a closure with no argument.

The check calls the closure and the timing times it, so both measure the same call. Work outside the
requested direction (the forward that precedes a backward) is done while binding, outside the closure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.core import BACKWARD, FORWARD, Case, Implementation, Operator
from weft.workbench.calls.buffers import Outputs, tensors_of


def bind(
    operator: Operator,
    implementation: Implementation,
    case: Case,
    direction: str,
    inputs: Sequence[torch.Tensor],
    grad: torch.Tensor | None = None,
) -> Callable[[], Outputs]:
    """Return the closure that computes one direction at these inputs.

    A forward closure returns the output. A backward closure returns a tuple with one gradient for each
    differentiable input and requires ``grad``: the gradient of the output (same shape and dtype), or
    the stacked gradients of the operator's differentiable outputs.
    """
    params = dict(case.params)
    if direction == FORWARD:
        forward, arguments = implementation.forward, tuple(inputs)
        if operator.in_place:
            overwritten = [i.name in operator.in_place for i in case.inputs]
            # Inputs that are not overwritten are passed on without a copy.
            return lambda: _on_copies(forward, arguments, overwritten, params)
        return lambda: forward(*arguments, **params)
    assert direction == BACKWARD and grad is not None
    if implementation.backward is not None:
        # The forward runs once, while binding: the closure contains the backward alone.
        output = implementation.forward(*inputs, **params)
        saved = operator.saved(tuple(inputs), output, params)
        backward, grads = implementation.backward, split_gradients(operator, grad)
        return lambda: backward(*grads, *saved, **params)
    differentiable = [i.name in operator.differentiable for i in case.inputs]
    grads = split_gradients(operator, grad)
    return _through_autograd(implementation, inputs, differentiable, grads, params)


def split_gradients(operator: Operator, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradient of each differentiable output; ``grad`` stacks them if there are several."""
    return (grad,) if operator.differentiable_outputs == 1 else grad.unbind(0)


def differentiable_outputs(operator: Operator, output: Outputs) -> torch.Tensor:
    """Return a meta tensor of the shape and dtype of the ``grad`` that :func:`split_gradients` takes.

    Raises ValueError if the differentiable outputs differ in shape or dtype.
    """
    first, *rest = tensors_of(output)[: operator.differentiable_outputs]
    if any((o.shape, o.dtype) != (first.shape, first.dtype) for o in rest):
        raise ValueError(f"{operator.name}: differentiable outputs must be of one shape and dtype")
    shape = (
        first.shape
        if operator.differentiable_outputs == 1
        else (operator.differentiable_outputs, *first.shape)
    )
    return torch.empty(shape, dtype=first.dtype, device="meta")


def _on_copies(
    forward: Callable[..., Any],
    arguments: Sequence[torch.Tensor],
    overwritten: Sequence[bool],
    params: dict[str, object],
) -> Outputs:
    """Call an in-place operator on copies of the inputs that it overwrites; return its outputs.

    Without fresh copies the second call would start from the first call's outputs. The copies are
    part of the measured time, for every implementation alike.
    """
    copies = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x) if needed else x
        for x, needed in zip(arguments, overwritten, strict=True)
    ]
    result: Outputs | None = forward(*copies, **params)
    if result is not None:
        return result
    # The operator returned None: its outputs are the overwritten copies.
    written = tuple(c for c, needed in zip(copies, overwritten, strict=True) if needed)
    return written[0] if len(written) == 1 else written


def _through_autograd(
    implementation: Implementation,
    inputs: Sequence[torch.Tensor],
    differentiable: Sequence[bool],
    grads: tuple[torch.Tensor, ...],
    params: dict[str, object],
) -> Callable[[], Outputs]:
    """Return the closure of a backward through autograd; the forward runs here, once."""
    arguments = [
        x.detach().requires_grad_() if needed else x for x, needed in zip(inputs, differentiable, strict=True)
    ]
    leaves = [x for x in arguments if x.requires_grad]
    with torch.enable_grad():
        outputs = tensors_of(implementation.forward(*arguments, **params))[: len(grads)]
    # The graph is kept because the closure is called many times on one forward.
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
