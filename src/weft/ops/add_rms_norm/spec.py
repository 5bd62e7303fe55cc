"""A residual added, then RMS norm: s = x + residual, y = rms_norm(s).

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import Operator
from weft.ops._shared.norm_spec import AT_MOST_ONE, DTYPES, cases, check, cost, rms_norm64


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, ...]:
    s = x + residual
    return rms_norm64(s, weight, eps), s


def check_arguments(x: Any, residual: Any, weight: Any, *, eps: Any = 1e-6) -> None:
    check("add_rms_norm", x, {"weight": weight}, eps, residual, added=True)


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """The backward wants the sum, which is an output, and the weight."""
    return (output[1], inputs[2])


OPERATOR = Operator(
    name="add_rms_norm",
    summary="residual added, then RMS norm",
    formula="s = x + residual; y = s / sqrt(mean s^2 + eps) weight",
    signature="add_rms_norm(x, residual, weight, eps=1e-6)",
    reference=reference,
    cases=cases(bias=False, added=True, eps=1e-6),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "residual", "weight"),
    graded=2,
    save=save,
    properties=(AT_MOST_ONE,),
    backward_note="from the sum s, with the gradients of y and of s; mean and deviation recomputed",
)
