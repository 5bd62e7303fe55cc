"""Layer norm over the last dimension: y = (x - mean) / sqrt(variance + eps) weight + bias.

Source: Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450).
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import Operator
from weft.ops._shared.norm_spec import DTYPES, NO_MEAN, cases, check, cost, layer_norm64


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float
) -> torch.Tensor:
    return layer_norm64(x, weight, bias, eps)


def check_arguments(x: Any, weight: Any, bias: Any, *, eps: Any = 1e-5) -> None:
    check("layer_norm", x, {"weight": weight, "bias": bias}, eps)


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """The backward wants x, which it must read anyway, and the weight: nothing else is kept."""
    return inputs[:2]


OPERATOR = Operator(
    name="layer_norm",
    summary="layer norm over the last dimension",
    formula="y = (x - mean) / sqrt(variance + eps) weight + bias",
    signature="layer_norm(x, weight, bias, eps=1e-5)",
    reference=reference,
    cases=cases(bias=True, added=False, eps=1e-5),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "weight", "bias"),
    save=save,
    properties=(NO_MEAN,),
    backward_note="from x and the weight; mean and deviation recomputed",
)
