"""Operators of several outputs, with a backward: what takes a gradient, and what takes none."""

from __future__ import annotations

import pytest
import torch

from weft.core import BACKWARD, Cost, Implementation, Input, Operator, case
from weft.core.operator import DIRECTIONS
from weft.core.record import FAIL, PASS
from weft.workbench.check.check import check

ONE = case(Input(name="x", shape=(5, 7)), Input(name="y", shape=(5, 7)))
BYTES = Cost(read=280, written=280)
Tensors = tuple[torch.Tensor, ...]


def both(x: torch.Tensor, y: torch.Tensor) -> Tensors:
    return x + 2 * y, x * y


def first(x: torch.Tensor, y: torch.Tensor) -> Tensors:
    """Only the product takes a gradient; the other is kept for the backward."""
    return x * y, x.exp()


def operator(reference: object, differentiable_outputs: int) -> Operator:
    return Operator(
        name="pair",
        reference=reference,  # type: ignore[arg-type]
        cases=(ONE,),
        cost=lambda c, d: BYTES,
        differentiable=("x", "y"),
        differentiable_outputs=differentiable_outputs,
        save=lambda inputs, outputs: (*inputs, outputs[1]) if differentiable_outputs == 1 else inputs,
    )


def of_both(g: torch.Tensor, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Tensors:
    return g + h * y, 2 * g + h * x


def of_first(g: torch.Tensor, x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor) -> Tensors:
    return g * y, g * kept.log()


def way(forward: object, backward: object) -> Implementation:
    return Implementation(
        operator="pair",
        name="mine",
        backend="torch",
        forward=forward,  # type: ignore[arg-type]
        backward=backward,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("differentiable_outputs", "forward", "backward", "status"),
    [
        (2, both, of_both, PASS),
        (2, both, None, PASS),
        (2, both, lambda g, h, x, y: of_both(h, g, x, y), FAIL),
        (1, first, of_first, PASS),
        (1, first, None, PASS),
        (1, first, lambda g, x, y, kept: (g * y, g * kept), FAIL),
    ],
)
def test_a_backward_gets_gradients_and_saved_tensors(differentiable_outputs, forward, backward, status):
    mine = operator(forward, differentiable_outputs)
    plain = way(forward, None)
    for direction in DIRECTIONS:
        found = check(mine, way(forward, backward), ONE, direction, "cpu", baseline=plain)
        wanted = status if direction == BACKWARD else PASS
        assert found.status == wanted, found.reason


def test_graded_outputs_that_differ_are_refused():
    def unlike(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        return x * y, (x * y).sum()

    plain = way(unlike, None)
    found = check(operator(unlike, 2), plain, ONE, BACKWARD, "cpu", baseline=plain)
    assert found.status == FAIL and "must be of one shape and dtype" in found.reason
