"""GEGLU: y = gate/2 (1 + tanh(sqrt(2/pi) (gate + 0.044715 gate^3))) up.

Source: Shazeer, "GLU variants improve transformer" (arXiv:2002.05202).
"""

from __future__ import annotations

import math
from functools import partial

import torch

from weft.core import Operator
from weft.ops._shared import gated
from weft.ops._shared.terms import finite, slope_terms


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    u = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(u)) * up


def gradient_scale(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """|g up| times the terms of GELU's slope, for the gate; nothing of up's gradient cancels."""
    return finite((grad * up).abs() * slope_terms(gate)), None


check_arguments = partial(gated.check_arguments, "geglu")

OPERATOR = Operator(
    name="geglu",
    summary="GEGLU, a gated activation",
    formula="y = gate/2 (1 + tanh(sqrt(2/pi) (gate + 0.044715 gate^3))) up",
    signature="geglu(gate, up)",
    reference=reference,
    cases=gated.CASES,
    cost=gated.cost,
    validate=check_arguments,
    dtypes=gated.DTYPES,
    differentiable=("gate", "up"),
    gradient_scale=gradient_scale,
    scale_reason="the terms of GELU's slope cancel near -0.75, and 1 - t^2 in the tail, each "
    "rounded before",
)
