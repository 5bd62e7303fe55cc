"""A residual added, then layer norm: s = x + residual, y = layer_norm(s).

Source: Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450).
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import Operator
from weft.ops._shared.norm_spec import DTYPES, NO_MEAN, cases, check, cost, layer_norm64


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, ...]:
    s = x + residual
    return layer_norm64(s, weight, bias, eps), s


def check_arguments(x: Any, residual: Any, weight: Any, bias: Any, *, eps: Any = 1e-5) -> None:
    check("add_layer_norm", x, {"weight": weight, "bias": bias}, eps, residual, added=True)


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """The backward wants the sum, which is an output, and the weight."""
    return (output[1], inputs[2])


OPERATOR = Operator(
    name="add_layer_norm",
    summary="residual added, then layer norm",
    formula="s = x + residual; y = (s - mean s) / sqrt(variance s + eps) weight + bias",
    signature="add_layer_norm(x, residual, weight, bias, eps=1e-5)",
    reference=reference,
    cases=cases(bias=True, added=True, eps=1e-5),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "residual", "weight", "bias"),
    graded=2,
    save=save,
    properties=(NO_MEAN,),
    backward_note="from the sum s, with the gradients of y and of s; mean and deviation recomputed",
)
