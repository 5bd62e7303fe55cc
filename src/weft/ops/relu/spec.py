"""ReLU: y = max(x, 0), elementwise; its gradient passes where y is above 0.

Source: Nair and Hinton, "Rectified linear units improve restricted Boltzmann machines" (ICML 2010).
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, Property, case
from weft.core.cases import ITEMSIZE
from weft.ops._shared import validate

DTYPES = ("float32", "float16", "bfloat16")
PIECE = 1 << 25  # elements


def reference(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def check_arguments(x: Any) -> None:
    validate.tensor("relu", "x", x, DTYPES)


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """The backward wants the output alone, which the next layer keeps as well."""
    return (output,)


def cost(c: Case, direction: str) -> Cost:
    """Forward reads x and writes y; backward reads the gradient and y and writes one gradient."""
    (x,) = c.inputs
    out = x.numel * ITEMSIZE[x.dtype]
    return Cost(read=x.nbytes if direction == FORWARD else 2 * out, written=out)


def _exact(y: torch.Tensor, x: torch.Tensor) -> float:
    """Nothing is rounded: each answer is x itself, or 0 where x is not above it."""
    for yp, xp in zip(y.reshape(-1).split(PIECE), x.reshape(-1).split(PIECE), strict=True):
        wanted = xp.masked_fill(xp <= 0, 0)
        if not bool(((yp == wanted) | (yp.isnan() & xp.isnan())).all()):
            return 2.0
    return 0.0


def _x(
    *shape: int, dtype: str = "float32", layout: str = "contiguous", values: str = "normal"
) -> Input:
    return Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values)


CHECKS = [
    *(case(_x(7, 129, dtype=d)) for d in DTYPES),
    case(_x(2049, 4099, dtype="bfloat16"), devices=("cuda",)),
]
EDGES = [
    *(case(_x(*s), tags="edge") for s in ((), (0,), (1031,))),
    *(case(_x(33, 65, layout=k), tags="edge") for k in ("transposed", "sliced", "expanded")),
    case(_x(1001, dtype="bfloat16", layout="shifted"), tags="edge"),
    *(case(_x(259, dtype=d, values="special"), tags="edge") for d in DTYPES),
]
BENCHES = [
    case(_x(16384, 16384, dtype="bfloat16"), tags="bench", devices=("cuda",)),
    case(_x(16384, 16384), tags="bench", devices=("cuda",)),
    case(_x(1024, 3072, dtype="bfloat16"), tags="bench", devices=("cuda",)),
    case(_x(1024, 1024), tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="relu",
    summary="ReLU activation",
    formula="y = max(x, 0)",
    signature="relu(x)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x",),
    save=save,
    properties=(Property(name="x itself or 0", holds=_exact),),
    backward_note="from the saved output: dx = g where y > 0",
)
