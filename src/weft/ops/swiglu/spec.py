"""SwiGLU: y = gate / (1 + exp(-gate)) up.

Source: Shazeer, "GLU variants improve transformer" (arXiv:2002.05202).
"""

from __future__ import annotations

from functools import partial

import torch

from weft.core import Operator
from weft.ops._shared import gated


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(gate) * up


check_arguments = partial(gated.check_arguments, "swiglu")

OPERATOR = Operator(
    name="swiglu",
    summary="SwiGLU, a gated activation",
    formula="y = gate / (1 + exp(-gate)) up",
    signature="swiglu(gate, up)",
    reference=reference,
    cases=gated.CASES,
    cost=gated.cost,
    validate=check_arguments,
    dtypes=gated.DTYPES,
    differentiable=("gate", "up"),
)
