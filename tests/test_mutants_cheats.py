"""The planted cheats and controls as data, and that each is right where nobody could be cheated."""

from __future__ import annotations

import pytest
import torch

from weft import backends
from weft.core import FORWARD, registry
from weft.workbench import inputs, mutants
from weft.workbench.mutants import cheats, controls
from weft.workbench.mutants.mutant import Mutant
from weft.workbench.mutants.planting import OPERATORS
from weft.workbench.selftest import left_out

ROWS = [f"C{n:02}" for n in range(1, 17)]
# What cannot be planted in every operator, with the reason.
FEWER = {
    "C09": "sleeping is no matter of the operator, and costs a selftest its own time",
    "C13": "only a product has weights to pack",
}
# These put functions of the process they run in out of place.
PATCHES = ("C08", "C12")


@pytest.mark.parametrize("row", ROWS)
def test_each_way_of_cheating_is_planted_in_every_operator(row: str) -> None:
    found = {m.operator for m in cheats.MUTANTS if m.row == row}
    assert found == set(OPERATORS) or (row in FEWER and found)


def test_every_check_that_is_named_can_be_left_out_or_cannot_be_done_without() -> None:
    known = {*left_out(), "timed", "floor"}
    for m in (*cheats.MUTANTS, *controls.MUTANTS):
        assert set(m.killed_by) <= known, m.id
        assert not m.only or m.only in left_out(), m.id


def test_what_is_kept_alone_by_a_check_is_killed_by_it() -> None:
    for m in cheats.MUTANTS:
        # Who finds the answer in memory dies of the wrong one that is left to give.
        assert not m.only or m.only == "process" or m.only in m.killed_by, m.id


def test_the_honest_ones_of_the_list_are_there() -> None:
    titles = " ".join(m.title for m in controls.MUTANTS)
    for word in ("eager", "float32", "in-place", "atomic", "about 0", "cache"):
        assert word in titles


@pytest.mark.parametrize(
    "mutant",
    [m for m in cheats.OWN if m.phase == "bench"],
    ids=lambda m: m.id,
)
def test_a_cheat_for_the_clock_is_right_at_first(mutant: Mutant) -> None:
    """Else the check would kill it, and the clock be no judge of it."""
    operator = registry.operator(mutant.operator)
    case = operator.select("check", "cpu")[0]
    made = mutant.make()
    for seed in range(3):
        x = inputs.make(case, "cpu", seed)
        expected = operator.reference(*(t.double() for t in x), **case.params)
        found = made.forward(*x, **case.params).double()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_pairs_leave_the_first_of_two_unwritten() -> None:
    forward = mutants.find("C04/softmax/eager/pairs").make().forward
    x = torch.randn(3, 129)
    first, second = forward(x), forward(x)
    assert torch.equal(first, second) and torch.equal(second, torch.softmax(x, -1))


def test_a_kept_answer_is_old_where_the_contents_are_new() -> None:
    forward = mutants.find("C01/gelu/eager/address").make().forward
    x = torch.randn(64)
    old = forward(x)
    x.copy_(torch.randn(64))
    assert torch.equal(forward(x), old)


def test_each_make_begins_with_nothing_kept() -> None:
    mutant = mutants.find("C01/gelu/eager/address")
    x = torch.randn(64)
    old = mutant.make().forward(x)
    x.copy_(torch.randn(64))
    assert not torch.equal(mutant.make().forward(x), old)


def test_an_atomic_sum_is_right() -> None:
    if not backends.backend_support("triton", "cpu"):
        pytest.skip("Triton's interpreter is not on")
    x = torch.randn(3, 4099)
    assert abs(float(controls.atomic_sum(x)) - float(x.double().sum())) < 1e-3


def test_all_controls_are_forward_or_both() -> None:
    assert all(FORWARD in m.make().directions for m in controls.MUTANTS)
