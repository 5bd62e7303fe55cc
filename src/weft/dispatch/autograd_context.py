"""Context of an autograd function: tensors between a forward and a backward, and refusals.

The functions take the context of a ``torch.autograd.Function``, or that of an operator of ``torch.library``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.core import WeftError

Function = Callable[..., Any]


def apply_without_checks(function: type[torch.autograd.Function]) -> Function:
    """Return ``function.apply`` for calls that pass :func:`can_skip_dispatcher` (operator.py).

    PyTorch's ``apply`` is Python, which looks for transforms and wrapped tensors before it calls another.
    """
    apply: Function = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def refuse_double_backward(name: str) -> None:
    """Raise :class:`WeftError` if the backward that calls this is to be differentiated itself.

    ``create_graph=True`` asks for it. The backward's kernels have no gradient, which would silently be
    missing from the result.
    """
    if torch.is_grad_enabled():
        raise WeftError(
            f"a gradient of {name}'s gradient",
            expected="backward without create_graph",
            got="create_graph=True",
            hint="impl='torch' can be differentiated as often as torch's own",
        )


def mark_outputs(ctx: Any, output: Any, schema: Any) -> None:
    """Say which of several outputs take a gradient, and remember what zeros in their place look like."""
    if schema.outputs == 1:
        return
    takes = schema.differentiable_outputs
    # PyTorch would allocate zeros for the gradient of every unused output. They are made in the backward
    # instead, and only for the outputs whose gradient it takes.
    ctx.set_materialize_grads(False)
    ctx.differentiable_outputs = [(o.shape, o.dtype, o.device) for o in output[:takes]]
    if schema.outputs > takes:
        ctx.mark_non_differentiable(*output[takes:])


def save(ctx: Any, saved: Sequence[Any]) -> None:
    """Save what the backward needs."""
    # Tensors go through save_for_backward, which checks their versions and honours saved-tensor hooks.
    tensors, ctx.non_tensors = [], []
    for s in saved:
        is_tensor = isinstance(s, torch.Tensor)
        ctx.non_tensors.append(None if is_tensor else s)
        if is_tensor:
            tensors.append(s)
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> Sequence[Any]:
    """Return what :func:`save` saved."""
    # saved_tensors unpacks all at once; None in non_tensors marks the places of tensors.
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if o is None else o for o in ctx.non_tensors]


def materialised(ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the gradients, with zeros for outputs that nothing used."""
    if all(g is not None for g in grads):
        return grads
    return tuple(
        torch.zeros(shape, dtype=dtype, device=device) if g is None else g
        for g, (shape, dtype, device) in zip(grads, ctx.differentiable_outputs, strict=True)
    )
