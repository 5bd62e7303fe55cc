"""The check distinguishes bf16 sums from rounded single steps: their error grows with the sum's length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from weft.core import FORWARD, Case, Cost, Implementation, Input, Operator, case
from weft.core.record import FAIL, PASS
from weft.workbench.calls import inputs
from weft.workbench.calls.inputs import KEPT_PARTS, thinned_seed
from weft.workbench.check.check import check
from weft.workbench.check.growth import LARGE_ERROR
from weft.workbench.check.oracle import Oracle

Forward = Callable[..., torch.Tensor]
BF16, M, K, N = torch.bfloat16, 48, 256, 40
A, B = (Input(name=n, shape=s, dtype="bfloat16") for n, s in (("a", (M, K)), ("b", (K, N))))
PRODUCT = case(A, B)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def with_bias(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b + 1.0


def exponential(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.exp(a @ b * 0.0625)


def rounded(f: Forward) -> Forward:
    """Compute in float32 and round once."""
    return lambda *x: f(*(t.float() for t in x)).to(x[0].dtype)


def in_partial_sums(parts: int, dtype: torch.dtype = BF16) -> Forward:
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(M, N, dtype=dtype)
        for p, q in zip(a.tensor_split(parts, 1), b.tensor_split(parts, 0), strict=True):
            total = total + (p.float() @ q.float()).to(dtype)
        return total.to(a.dtype)

    return forward


def in_rounded_steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Round the product of a correct kernel ten more times, each time by as much as a single step."""
    y = (a.float() @ b.float()).bfloat16()
    for factor in (1.1, 1.3, 0.9, 1.7, 0.7):
        y = (y * factor).float().bfloat16()
        y = (y.float() / torch.tensor(factor).bfloat16().float()).bfloat16()
    return y


def judge(forward: Forward, reference: Forward = product, at: Case = PRODUCT, **more: Any) -> Any:
    operator = Operator(
        name="toy",
        summary="a toy",
        reference=reference,
        cases=(at,),
        cost=lambda *_: Cost(read=1, written=1, flops=1),
    )
    baseline = Implementation(
        operator="toy", name="eager", backend="eager", forward=rounded(reference), directions=(FORWARD,)
    )
    mine = Implementation(
        operator="toy", name="mine", backend="eager", forward=forward, directions=(FORWARD,)
    )
    oracle = Oracle(operator, at, FORWARD, "cpu", [11, 22], baseline)
    return check(operator, mine, at, FORWARD, "cpu", oracle=oracle, **more)


@pytest.mark.parametrize("parts", [16, 24, 32])
def test_partial_sums_in_bf16_are_refused_by_growth_alone(parts: int) -> None:
    verdict = judge(in_partial_sums(parts))
    assert verdict.status == FAIL and verdict.reason.startswith("growth: "), verdict.reason
    assert "a sum is kept in torch.bfloat16" in verdict.reason
    assert judge(in_partial_sums(parts), without={"growth"}).status == PASS


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_few_partial_sums_are_within_the_tolerance(parts: int) -> None:
    assert judge(in_partial_sums(parts)).status == PASS


def test_partial_sums_in_float32_pass() -> None:
    assert judge(in_partial_sums(32, torch.float32)).status == PASS


def test_roundings_of_single_steps_do_not_grow_however_many_they_are() -> None:
    verdict = judge(in_rounded_steps)
    assert verdict.error > LARGE_ERROR * verdict.baseline_error, (
        "as far from the reference as the rule looks at"
    )
    assert verdict.status == PASS, verdict.reason


@pytest.mark.parametrize("reference", [with_bias, exponential])
def test_a_reference_that_is_not_additive_is_left_to_the_other_rules(reference: Forward) -> None:
    """The error of a function of the sum, such as an exponential, may depend on the size of the sum."""

    def late(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        sums = in_partial_sums(16)(a, b)
        return sums + 1 if reference is with_bias else torch.exp(sums * 0.0625)

    verdict = judge(late, reference)
    assert not verdict.reason.startswith("growth")


def test_a_thinned_seed_keeps_an_eighth_of_one_input_along_one_dimension() -> None:
    whole, thinned = (inputs.make(PRODUCT, "cpu", seed) for seed in (5, thinned_seed(5, 1, 0)))
    assert torch.equal(whole[0], thinned[0])
    nonzero_length = K // KEPT_PARTS
    assert (
        torch.equal(whole[1][:nonzero_length], thinned[1][:nonzero_length])
        and not thinned[1][nonzero_length:].any()
    )
    columns = inputs.make(PRODUCT, "cpu", thinned_seed(5, 0, 1))[0]
    assert (
        torch.equal(columns[:, :nonzero_length], whole[0][:, :nonzero_length])
        and not columns[:, nonzero_length:].any()
    )


def test_the_inputs_that_problems_draw_are_thinned_as_well() -> None:
    seeds: list[int] = []

    def draw(seed: int, device: str) -> list[torch.Tensor]:
        seeds.append(seed)
        return [torch.ones(M, K, dtype=BF16), torch.ones(K, N, dtype=BF16)]

    a, b = inputs.make(replace(PRODUCT, draw=draw), "cpu", thinned_seed(7, 0, 0))
    assert seeds == [7] and int(a.count_nonzero()) == M // KEPT_PARTS * K and b.all()


def test_a_reference_that_raises_at_zeros_is_left_to_the_other_rules() -> None:
    def raises_at_zeros(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not (a.any(0).all() and b.any(1).all() and a.any(1).all() and b.any(0).all()):
            raise ValueError("zeros")
        return a @ b

    verdict = judge(in_partial_sums(16), raises_at_zeros)
    assert verdict.status == PASS, verdict.reason
