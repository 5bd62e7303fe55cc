"""A linear layer and GELU in tanh form: pre = x W^T + b, y = gelu(pre).

``keep`` says whether pre is an output too, for the backward; without it the backward computes pre
again by a product. Source of GELU: arXiv:1606.08415.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Operator, WeftError
from weft.ops._shared import linear_spec
from weft.ops._shared.linear_spec import DTYPES, TOLERANCE, make_case, product_cost, sizes


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, keep: bool = True
) -> Any:
    pre = x @ weight.t() + bias
    u = math.sqrt(2 / math.pi) * (pre + 0.044715 * pre**3)
    y = 0.5 * pre * (1 + torch.tanh(u))
    return (y, pre) if keep else y


def check_arguments(x: Any, weight: Any, bias: Any, *, keep: Any = True) -> None:
    linear_spec.check_arguments("linear_gelu", x, weight, bias)
    if not isinstance(keep, bool):
        raise WeftError("linear_gelu: keep", expected="True or False", got=repr(keep))


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """Both factors, and pre where it was kept; the bias where it is to be computed again."""
    return (*inputs[:2], output[1] if isinstance(output, tuple) else inputs[2])


def cost(c: Case, direction: str) -> Cost:
    """One product forward, and two back; without pre kept a third, which finds it again."""
    m, n, k = sizes(c)
    keep = bool(c.params.get("keep", True))
    factors = m * k + n * k
    if direction == FORWARD:
        return product_cost(c, 1, factors + n, (1 + keep) * m * n)
    read = factors + m * n + (m * n if keep else n)
    return product_cost(c, 2 if keep else 3, read, factors + n)


CHECKS = [
    *(make_case(5, 16, 24, d) for d in DTYPES),
    *(make_case(35, 67, 41, d) for d in DTYPES),
    make_case((2, 17), 40, 72),
    make_case(40, 136, 40),
    make_case(33, 72, 40, keep=False),
    make_case(19, 40, 24, values="large"),
    make_case(1000, 1016, 1032, "float16", devices=("cuda",)),
    make_case(2100, 1160, 200, "bfloat16", devices=("cuda",)),
    make_case(2100, 1160, 200, "bfloat16", devices=("cuda",), keep=False),
]
EDGES = [
    make_case(0, 5, 3, tags="edge"),
    make_case(40, 24, 16, "float16", layouts=("transposed", "sliced"), tags="edge", keep=False),
]
BENCHES = [
    make_case(16384, 3072, 768, "bfloat16", tags="bench", devices=("cuda",)),
    make_case(65536, 3072, 768, "bfloat16", tags="bench", devices=("cuda",)),
    make_case(16384, 3072, 768, "bfloat16", tags="bench", devices=("cuda",), keep=False),
    make_case(512, 512, 512, tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="linear_gelu",
    summary="linear layer and GELU in one, its argument kept or not",
    formula="pre = x W^T + b, y = gelu(pre)",
    signature="linear_gelu(x, weight, bias, keep=True)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "weight", "bias"),
    save=save,
    tolerance=TOLERANCE,
    backward_note="dpre = g gelu'(pre), dx = dpre W, dW = dpre^T x, db = sum of dpre over the rows",
)
