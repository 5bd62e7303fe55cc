"""GELU in its tanh form: y = x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3).

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415), the approximation
that GPT-2 trains with.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, Property, case
from weft.core.cases import ITEMSIZE
from weft.ops._shared import validate
from weft.ops._shared.terms import finite, slope_terms

PIECE = 1 << 25  # elements
DTYPES = ("float32", "float16", "bfloat16")


def reference(x: torch.Tensor) -> torch.Tensor:
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(u))


def gradient_scale(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """|g| times the terms of GELU's slope. Piece by piece: at 2^31 elements a temporary has
    17 GB."""
    found = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    pieces = zip(*(v.reshape(-1).split(PIECE) for v in (grad, x, found)), strict=True)
    for g, v, out in pieces:
        out.copy_(finite(g.abs() * slope_terms(v)))
    return found.view(x.shape)


def check_arguments(x: Any) -> None:
    validate.tensor("gelu", "x", x, DTYPES)


def cost(c: Case, direction: str) -> Cost:
    """Forward reads x and writes y; backward reads the gradient and x and writes one gradient."""
    (x,) = c.inputs
    out = x.numel * ITEMSIZE[x.dtype]
    return Cost(read=x.nbytes + (0 if direction == FORWARD else out), written=out)


def _bounded(y: torch.Tensor, x: torch.Tensor) -> float:
    """min(x, 0) - 0.17 <= gelu(x) <= max(x, 0) for finite x: it never leaves the ramp's side."""
    worst, eps = 0.0, torch.finfo(y.dtype).eps
    # Piece by piece: at 2^31 elements a float64 temporary of the whole would be 17 GB.
    for yp, xp in zip(y.reshape(-1).split(PIECE), x.reshape(-1).split(PIECE), strict=True):
        y64, x64 = yp.double(), xp.double()
        slack = eps * x64.abs() + 1e-6
        over = y64 - x64.clamp(min=0)
        under = x64.clamp(max=0).clamp(min=-0.1701) - y64
        off = torch.where(x64.isfinite(), torch.maximum(over, under) / slack, 0.0)
        worst = max(worst, float(off.amax()) if off.numel() else 0.0)
    return worst


def _x(
    *shape: int, dtype: str = "float32", layout: str = "contiguous", values: str = "normal"
) -> Input:
    return Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values)


CHECKS = [
    *(case(_x(7, 129, dtype=d)) for d in DTYPES),
    *(case(_x(4099, dtype=d, values="sweep")) for d in DTYPES),
    *(
        case(_x(64, 64, dtype=d, values=v))
        for d in ("float32", "float16")
        for v in ("outliers", "offset")
    ),
    *(case(_x(3, 1000, values=v)) for v in ("large", "tiny", "equal")),
]
EDGES = [
    *(case(_x(*s), tags="edge") for s in ((), (0,), (1,), (5, 0, 3), (1031,))),
    *(
        case(_x(33, 65, layout=k), tags="edge")
        for k in ("transposed", "sliced", "expanded", "shifted")
    ),
    *(case(_x(1001, dtype=d, layout="shifted"), tags="edge") for d in ("float16", "bfloat16")),
    *(case(_x(259, dtype=d, values="special"), tags="edge") for d in DTYPES),
    case(_x(2**31 + 8, dtype="bfloat16"), tags="edge", devices=("cuda",)),
]
BENCHES = [
    case(_x(16384, 16384, dtype="bfloat16"), tags="bench", devices=("cuda",)),
    case(_x(16384, 16384), tags="bench", devices=("cuda",)),
    case(_x(1024, 3072, dtype="bfloat16"), tags="bench", devices=("cuda",)),
    case(_x(1024, 1024), tags="bench", devices=("cpu",)),
    case(
        _x(1024, 3072, dtype="bfloat16"), tags="bench", devices=("cpu",), name="bf16-1024x3072-cpu"
    ),
]

OPERATOR = Operator(
    name="gelu",
    summary="GELU activation, tanh form",
    formula="y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))",
    signature="gelu(x)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x",),
    gradient_scale=gradient_scale,
    scale_reason="the gradient's terms cancel near x = -0.75, and 1 - t^2 in the tail, each "
    "rounded before",
    properties=(Property(name="stays on the ramp's side", holds=_bounded),),
)
