"""RMS norm over the last dimension: y = x / sqrt(mean x^2 + eps) weight.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import Operator
from weft.ops._shared.norm_spec import AT_MOST_ONE, DTYPES, cases, check, cost, rms_norm64


def reference(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return rms_norm64(x, weight, eps)


def check_arguments(x: Any, weight: Any, *, eps: Any = 1e-6) -> None:
    check("rms_norm", x, {"weight": weight}, eps)


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """The backward wants x, which it must read anyway, and the weight: nothing else is kept."""
    return inputs[:2]


OPERATOR = Operator(
    name="rms_norm",
    summary="RMS norm over the last dimension",
    formula="y = x / sqrt(mean x^2 + eps) weight",
    signature="rms_norm(x, weight, eps=1e-6)",
    reference=reference,
    cases=cases(bias=False, added=False, eps=1e-6),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "weight"),
    save=save,
    properties=(AT_MOST_ONE,),
    backward_note="from x and the weight; the deviation recomputed",
)
