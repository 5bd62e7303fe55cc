"""A linear layer added to a residual: y = x W^T + b + residual, with one rounding at the end."""

from __future__ import annotations

from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Operator
from weft.ops._shared import linear_spec
from weft.ops._shared.linear_spec import DTYPES, TOLERANCE, make_case, product_cost, sizes


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    return x @ weight.t() + bias + residual


def check_arguments(x: Any, weight: Any, bias: Any, residual: Any) -> None:
    linear_spec.check_arguments("linear_residual", x, weight, bias)
    linear_spec.check_residual("linear_residual", x, weight, residual)


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """The backward wants both factors, and neither the bias nor the residual."""
    return inputs[:2]


def cost(c: Case, direction: str) -> Cost:
    """Forward: one product. Backward: two, dbias, and dresidual, which is the gradient itself."""
    m, n, k = sizes(c)
    if direction == FORWARD:
        return product_cost(c, 1, m * k + n * k + n + m * n, m * n)
    return product_cost(c, 2, m * n + m * k + n * k, m * k + n * k + n + m * n)


CHECKS = [
    *(make_case(5, 16, 24, d, residual=True) for d in DTYPES),
    *(make_case(35, 67, 41, d, residual=True) for d in DTYPES),
    make_case((2, 17), 40, 72, residual=True),
    make_case(40, 136, 40, residual=True),
    make_case(1000, 1016, 1032, "float16", residual=True, devices=("cuda",)),
    make_case(2100, 1160, 200, "bfloat16", residual=True, devices=("cuda",)),
]
EDGES = [
    *(make_case(*s, residual=True, tags="edge") for s in ((0, 5, 3), (5, 3, 0))),
    make_case(40, 24, 16, layouts=("transposed", "sliced"), residual=True, tags="edge"),
    make_case(19, 40, 33, values="special", residual=True, tags="edge"),
]
BENCHES = [
    make_case(16384, 768, 3072, "bfloat16", residual=True, tags="bench", devices=("cuda",)),
    make_case(512, 512, 512, residual=True, tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="linear_residual",
    summary="linear layer added to a residual",
    formula="y = x W^T + b + residual",
    signature="linear_residual(x, weight, bias, residual)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "weight", "bias", "residual"),
    save=save,
    tolerance=TOLERANCE,
    backward_note="dx = g W, dW = g^T x, db = sum of g over the rows, dresidual = g",
)
