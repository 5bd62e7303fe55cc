"""W22: a correct forward with a wrong gradient: a term dropped, one missing, a wrong type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from weft.core import registry
from weft.ops.matmul.with_torch import gradients
from weft.ops.sum.spec import spread
from weft.workbench.selftest.mutants import wrong_cross_entropy, wrong_layer_norm
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, honest, plant

Gradients = tuple[Any, ...]
SEVERAL = ("matmul", "layer_norm")  # several gradients, so that the tuple cannot be left out


def _gelu(grad: torch.Tensor, x: torch.Tensor) -> Gradients:
    return (torch.ops.aten.gelu_backward(grad, x, approximate="tanh"),)


def _softmax(grad: torch.Tensor, y: torch.Tensor) -> Gradients:
    return registry.implementation("softmax", "eager").backward(grad, y)  # type: ignore[misc]


def _matmul(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **params: object) -> Gradients:
    return gradients(grad, a, b)


HONEST: Mapping[str, Forward] = {
    "softmax": _softmax,
    "gelu": _gelu,
    "sum": spread,
    "matmul": _matmul,
    "layer_norm": wrong_layer_norm.gradients,
    "cross_entropy": wrong_cross_entropy.gradients,
}


def _softmax_no_sum(grad: torch.Tensor, y: torch.Tensor) -> Gradients:
    """Compute dx = y g, without the sum over the row."""
    return ((grad.float() * y.float()).to(y.dtype),)


def _gelu_no_derivative(grad: torch.Tensor, x: torch.Tensor) -> Gradients:
    """Compute the gate's term without the term of the gate's own derivative."""
    wide = x.float()
    share = torch.sigmoid(2 * 0.7978845608028654 * (wide + 0.044715 * wide**3))
    return ((grad.float() * share).to(x.dtype),)


def _sum_mean(grad: torch.Tensor, shape: torch.Size) -> Gradients:
    """Compute the gradient of the mean."""
    return ((grad / max(1, shape.numel())).expand(shape).clone(),)


def _matmul_negated(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: object) -> Gradients:
    """Negate db."""
    da, db = gradients(grad, a, b)
    return da, db.neg()


def _layer_norm_no_mean(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> Gradients:
    """Compute dx without subtracting the mean of the incoming gradient."""
    dx, dw, db = wrong_layer_norm.gradients(grad, x, weight, eps=eps)
    wide = x.float()
    variance = (wide - wide.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)
    mean = (grad.float() * weight.float()).mean(-1, keepdim=True) * torch.rsqrt(variance + eps)
    return (dx.float() + mean).to(x.dtype), dw, db


def _cross_entropy_no_target(
    grad: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, *more: Any, **params: Any
) -> Gradients:
    """Compute the probabilities without subtracting 1 at the target."""
    return ((grad.float()[:, None] * torch.softmax(logits.float(), -1)).to(logits.dtype),)


WRONG: Mapping[str, Forward] = {
    "layer_norm": _layer_norm_no_mean,
    "cross_entropy": _cross_entropy_no_target,
    "softmax": _softmax_no_sum,
    "gelu": _gelu_no_derivative,
    "sum": _sum_mean,
    "matmul": _matmul_negated,
}


def _for(operator: str) -> Iterator[Mutant]:
    right = HONEST[operator]

    def one(
        what: str, title: str, killed_by: str, backward: Callable[..., Any], only: str = "backward"
    ) -> Mutant:
        return plant(
            f"W22/{operator}/eager/{what}",
            title,
            killed_by,
            lambda: honest(operator),
            backward=lambda: backward,
            only=only,
        )

    def missing(*x: Any, **params: Any) -> Gradients:
        return (*right(*x, **params)[:-1], None)

    def bare(*x: Any, **params: Any) -> Any:
        grads = right(*x, **params)
        return grads[0] if len(grads) == 1 else list(grads)

    def spoils(grad: torch.Tensor, *saved: Any, **params: Any) -> Gradients:
        # Copies, since a gradient may be a view of the incoming one, which is zeroed next.
        grads = tuple(g.clone() for g in right(grad, *saved, **params))
        grad.zero_()
        return grads

    def unwritten(*x: Any, **params: Any) -> Gradients:
        return tuple(torch.empty_like(g) for g in right(*x, **params))

    yield one("a-term-dropped", "the gradient lacks a term", "error drift", WRONG[operator])
    yield one("missing", "None for a gradient", "type", missing)
    yield one("no-tuple", "a gradient that is not in a tuple", "type", bare,
              "backward" if operator in SEVERAL else "type")  # fmt: skip
    yield one("spoils-grad", "zeroes the incoming gradient", "inputs", spoils)
    yield one("nothing", "gradients never written", "written", unwritten)


MUTANTS = tuple(m for operator in HONEST for m in _for(operator))
