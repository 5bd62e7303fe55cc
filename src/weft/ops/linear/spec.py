"""A linear layer: y = x W^T + b, summed in float32 with one rounding at the end."""

from __future__ import annotations

from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Operator
from weft.ops._shared import linear_spec
from weft.ops._shared.linear_spec import DTYPES, TOLERANCE, make_case, product_cost, sizes


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x @ weight.t() + bias


def check_arguments(x: Any, weight: Any, bias: Any) -> None:
    linear_spec.check_arguments("linear", x, weight, bias)


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """The backward wants both factors, and not the bias."""
    return inputs[:2]


def cost(c: Case, direction: str) -> Cost:
    """Forward: one product. Backward: two, of the gradient with each factor, and dbias."""
    m, n, k = sizes(c)
    if direction == FORWARD:
        return product_cost(c, 1, m * k + n * k + n, m * n)
    return product_cost(c, 2, m * n + m * k + n * k, m * k + n * k + n)


CHECKS = [
    *(make_case(5, 16, 24, d) for d in DTYPES),
    *(make_case(35, 67, 41, d) for d in DTYPES),
    make_case((2, 17), 40, 72),
    make_case(40, 136, 40),
    make_case(1000, 1016, 1032, "float16", devices=("cuda",)),
    make_case(2100, 1160, 200, "bfloat16", devices=("cuda",)),
]
EDGES = [
    *(make_case(*s, tags="edge") for s in ((0, 5, 3), (5, 3, 0))),
    make_case(40, 24, 16, layouts=("transposed", "sliced"), tags="edge"),
    make_case(19, 40, 33, values="special", tags="edge"),
    make_case(40, 72, 24, "bfloat16", layouts=("sliced", "transposed"), tags="edge"),
]
BENCHES = [
    make_case(65536, 2304, 768, "bfloat16", tags="bench", devices=("cuda",)),
    make_case(16384, 768, 3072, "bfloat16", tags="bench", devices=("cuda",)),
    make_case(512, 512, 512, tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="linear",
    summary="linear layer: product with a weight, plus bias",
    formula="y = x W^T + b",
    signature="linear(x, weight, bias)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "weight", "bias"),
    save=save,
    tolerance=TOLERANCE,
    backward_note="dx = g W, dW = g^T x, db = sum of g over the rows",
)
