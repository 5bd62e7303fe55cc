"""Operators with several outputs and a backward: differentiable and non-differentiable outputs."""

from __future__ import annotations

import pytest
import torch

from weft.core import BACKWARD, Cost, Implementation, Input, Operator, case, registry
from weft.core.operator import DIRECTIONS
from weft.core.record import FAIL, PASS
from weft.workbench.check.check import check
from weft.workbench.selftest import mutants

ONE = case(Input(name="x", shape=(5, 7)), Input(name="y", shape=(5, 7)))
BYTES = Cost(read=280, written=280)
Tensors = tuple[torch.Tensor, ...]


def both(x: torch.Tensor, y: torch.Tensor) -> Tensors:
    return x + 2 * y, x * y


def first(x: torch.Tensor, y: torch.Tensor) -> Tensors:
    """Return a differentiable product, and an exponential that is saved for the backward."""
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


def of_first(g: torch.Tensor, x: torch.Tensor, y: torch.Tensor, exponential: torch.Tensor) -> Tensors:
    return g * y, g * exponential.log()


def implementation(forward: object, backward: object) -> Implementation:
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
        (1, first, lambda g, x, y, exponential: (g * y, g * exponential), FAIL),
    ],
)
def test_a_backward_gets_gradients_and_saved_tensors(differentiable_outputs, forward, backward, status):
    mine = operator(forward, differentiable_outputs)
    plain = implementation(forward, None)
    for direction in DIRECTIONS:
        verdict = check(mine, implementation(forward, backward), ONE, direction, "cpu", baseline=plain)
        expected = status if direction == BACKWARD else PASS
        assert verdict.status == expected, verdict.reason


def test_graded_outputs_that_differ_are_refused():
    def unlike(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        return x * y, (x * y).sum()

    plain = implementation(unlike, None)
    verdict = check(operator(unlike, 2), plain, ONE, BACKWARD, "cpu", baseline=plain)
    assert verdict.status == FAIL and "must be of one shape and dtype" in verdict.reason


def test_a_wrong_gradient_is_named_after_its_input() -> None:
    """mlp_gelu has five gradients and names of three outputs."""
    operator, wrong = registry.operator("mlp_gelu"), mutants.find("W22/mlp_gelu/eager/pre-for-hidden")
    verdict = check(operator, wrong.make(), operator.case("fp32-5x24x16x8"), BACKWARD, "cpu")
    assert verdict.status == FAIL and "gradient of proj_weight: largest error" in verdict.reason
