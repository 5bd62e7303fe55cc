"""Binding: from an implementation and a case's inputs to a closure with no argument.

The check calls the closure and the clock times it, so that both see the very same thing.
Everything that is not the direction asked for (the forward before a backward) happens here,
outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.core import BACKWARD, FORWARD, Case, Implementation, Operator
from weft.workbench.slots import Result, tensors_of


def bind(
    operator: Operator,
    implementation: Implementation,
    case: Case,
    direction: str,
    inputs: Sequence[torch.Tensor],
    grad: torch.Tensor | None = None,
) -> Callable[[], Result]:
    """The closure that computes one direction at these inputs.

    Forward returns the output. Backward returns a tuple with one gradient for each differentiable
    input; ``grad`` is due there: the gradient of the output (of its shape and dtype), or of the
    operator's several graded outputs, stacked.
    """
    params = dict(case.params)
    if direction == FORWARD:
        forward, arguments = implementation.forward, tuple(inputs)
        if operator.in_place:
            overwritten = [i.name in operator.in_place for i in case.inputs]
            return lambda: _on_copies(forward, arguments, overwritten, params)
        return lambda: forward(*arguments, **params)
    assert direction == BACKWARD and grad is not None
    if implementation.backward is not None:
        output = implementation.forward(*inputs, **params)
        saved = operator.save(tuple(inputs), output)
        backward, grads = implementation.backward, apart(operator, grad)
        return lambda: backward(*grads, *saved, **params)
    differentiable = [i.name in operator.differentiable for i in case.inputs]
    grads = apart(operator, grad)
    return _through_autograd(implementation, inputs, differentiable, grads, params)


def apart(operator: Operator, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradient of each graded output, out of what holds them all."""
    return (grad,) if operator.graded == 1 else grad.unbind(0)


def graded(operator: Operator, output: Result) -> torch.Tensor:
    """A tensor without values, of the shape and dtype of what :func:`apart` takes apart.

    Raises ValueError where the graded outputs are not alike.
    """
    first, *more = tensors_of(output)[: operator.graded]
    if any((o.shape, o.dtype) != (first.shape, first.dtype) for o in more):
        raise ValueError(f"{operator.name}: graded outputs must be of one shape and dtype")
    shape = first.shape if operator.graded == 1 else (operator.graded, *first.shape)
    return torch.empty(shape, dtype=first.dtype, device="meta")


def _on_copies(
    forward: Callable[..., Any],
    arguments: Sequence[torch.Tensor],
    overwritten: Sequence[bool],
    params: dict[str, object],
) -> Result:
    """The answer of a call that may overwrite some inputs: it gets copies of those, each time.

    The copies are part of what is timed, for every implementation alike; without them the second
    call would compute something else than the first.
    """
    copies = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
        if wanted
        else x
        for x, wanted in zip(arguments, overwritten, strict=True)
    ]
    result: Result | None = forward(*copies, **params)
    if result is not None:
        return result
    written = tuple(c for c, wanted in zip(copies, overwritten, strict=True) if wanted)
    return written[0] if len(written) == 1 else written


def _through_autograd(
    implementation: Implementation,
    inputs: Sequence[torch.Tensor],
    differentiable: Sequence[bool],
    grads: tuple[torch.Tensor, ...],
    params: dict[str, object],
) -> Callable[[], Result]:
    arguments = [
        x.detach().requires_grad_() if wanted else x
        for x, wanted in zip(inputs, differentiable, strict=True)
    ]
    leaves = [x for x in arguments if x.requires_grad]
    with torch.enable_grad():
        outputs = tensors_of(implementation.forward(*arguments, **params))[: len(grads)]
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
