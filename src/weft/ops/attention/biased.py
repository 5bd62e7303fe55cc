"""Attention with sinks, ALiBi or an additive bias: ``weft::attention_biased``.

The operator ``weft::attention`` takes no optional tensors. Calls that have any take this one, in which a
tensor of shape (0,) stands for an absent one. Plain torch code (``eager``, ``torch``, ``compile``) is called
as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core import WeftError, registry
from weft.dispatch.invariance import refuse_if_requested
from weft.dispatch.operator import TRACED, Schema, backward_of, call, refuse_unsupported, register, resolve
from weft.dispatch.plan_cache import memoized
from weft.ops._common.placeholder import placeholder
from weft.ops.attention.layout import like
from weft.ops.attention.spec import DIFFERENTIABLE, PARAMS, SCALARS, check_arguments
from weft.ops.attention.terms import NAMES, Terms, refuse_slopes_gradient

TENSORS = "Tensor q, Tensor k, Tensor v, Tensor key_lengths, " + ", ".join(f"Tensor {n}" for n in NAMES)
SWITCH = "bias_gradient"  # False: the gradient of the bias is not computed


def _present(extras: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return the terms without placeholders, by name."""
    return {name: x for name, x in zip(NAMES, extras, strict=True) if x.dim() != 1 or x.shape[0]}


def _forward(impl: str, *inputs: Tensor, bias_gradient: bool, **params: Any) -> tuple[Tensor, Tensor]:
    present = _present(inputs[4:])
    tensors, scalars = (*inputs[:4], *present.values()), {**params, "terms": "+".join(present)}
    refuse_unsupported("attention", impl, tensors, scalars)
    return registry.implementation("attention", impl).forward(*tensors, **scalars)  # type: ignore[no-any-return]


def _backward(impl: str, grad: Tensor, *saved: Tensor, bias_gradient: bool, **params: Any) -> Any:
    *inputs, out, lse = saved
    present = _present(tuple(inputs[4:]))
    run = backward_of("attention", impl)
    scalars = {**params, "terms": "+".join(present), SWITCH: bias_gradient}
    dq, dk, dv, *rest = run(grad, *inputs[:4], *present.values(), out, lse, **scalars)
    names = [name for name in present if name in DIFFERENTIABLE]
    gradients = dict(zip(names, rest, strict=True))
    sinks, _, bias = inputs[4:]
    absent = {name: x.new_empty(x.shape) for name, x in (("sinks", sinks), ("bias", bias))}
    return dq, dk, dv, *(absent | gradients).values()


def _fake(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    _, sinks, _, bias, *_ = rest
    return like(q), like(k), like(v), sinks.new_empty(sinks.shape), bias.new_empty(bias.shape)


register(
    "attention_biased",
    Schema(
        inputs=f"{TENSORS}, {SCALARS}, bool {SWITCH}",
        saved=f"{TENSORS}, Tensor out, Tensor lse, {SCALARS}, bool {SWITCH}",
        params=(*PARAMS, SWITCH),
        gradients=len(DIFFERENTIABLE),
        outputs=2,
        differentiable_outputs=1,
        differentiable=DIFFERENTIABLE,
        fake=_fake,
        fake_backward=_fake_backward,
        forward=_forward,
        backward=_backward,
        save=lambda inputs, output: (*inputs, *output),
    ),
)


def attention_biased(
    inputs: tuple[Any, ...], terms: Terms, params: dict[str, Any], impl: str | None, batch_invariant: bool
) -> Tensor:
    """Return the output for q, k, v and key lengths (or None) in ``inputs``, and at least one term."""
    q, k, v, key_lengths = inputs
    present = terms.present
    scalars = {**params, "terms": "+".join(present)}

    def check() -> None:
        check_arguments(q, k, v, key_lengths, *present.values(), **scalars)

    if not all(isinstance(x, Tensor) for x in (q, *present.values())):
        check()  # raises
    refuse_slopes_gradient(terms)
    impl = impl or ("triton" if q.is_cuda else "eager")
    lengths = key_lengths
    if lengths is None:
        lengths = placeholder(q, q.shape[:1], torch.int32)

    def choose_kernel() -> tuple[bool]:
        check()
        return (resolve("attention", impl) not in TRACED,)

    tensors = (q, k, v, lengths, *present.values())
    if torch.compiler.is_compiling():
        (is_kernel,) = choose_kernel()
    else:
        (is_kernel,) = memoized(("attention_biased", impl), tensors, scalars, choose_kernel)
    if not is_kernel:
        return call("attention", tensors, scalars, impl, check, batch_invariant)[0]  # type: ignore[no-any-return]
    refuse_if_requested("attention_biased", batch_invariant)
    absent = placeholder(q, (0,), torch.float32)
    extras = [absent if x is None else x for x in terms]
    has_gradient = terms.bias is not None and terms.bias.requires_grad
    run = torch.ops.weft.attention_biased
    return run(q, k, v, lengths, *extras, *params.values(), has_gradient, impl)[0]  # type: ignore[no-any-return]


def refuse_terms(name: str, **terms: Any) -> None:
    """Raise :class:`WeftError` for a term in a call of an operator that has none."""
    for term, value in terms.items():
        if value is not None:
            hint = "call weft.ops.attention on the parts: it has sinks, alibi_slopes and bias"
            raise WeftError(f"{name}: {term}", expected="None", got=type(value).__name__, hint=hint)
