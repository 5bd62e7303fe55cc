"""Planted problems in other suites' formats: a sample is judged in each run, all with `--exhaustive`."""

from __future__ import annotations

import pytest

from weft.workbench.selftest import mutants
from weft.workbench.selftest import run as selftest
from weft.workbench.selftest.judge import NOT_RUN
from weft.workbench.selftest.mutants import layouts, problem_controls, unvarying
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.run import can_be_left_out

PER_RUN = 3  # of the mutants
CONTROLS = (*problem_controls.MUTANTS, *(m for m in layouts.MUTANTS if m.honest))


def _judge(mutant: Mutant, without: tuple[str, ...] = ()) -> selftest.Summary:
    return selftest.run([mutant], "cpu", without=without)


@pytest.mark.slow
@pytest.mark.sampled(PER_RUN)
@pytest.mark.parametrize("mutant", unvarying.MUTANTS, ids=lambda m: m.id)
def test_a_problem_is_killed_by_its_check_alone(mutant: Mutant) -> None:
    (result,) = _judge(mutant).results
    assert result.check in mutant.killed_by, result
    assert _judge(mutant, (mutant.only,)).to_json()["survivors"] == [mutant.id]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("control", CONTROLS, ids=lambda m: m.id)
def test_an_honest_problem_passes(control: Mutant) -> None:
    summary = _judge(control)
    assert summary.good or summary.results[0].status == NOT_RUN, summary.results


@pytest.mark.slow
@pytest.mark.sampled(PER_RUN)
@pytest.mark.parametrize("mutant", [m for m in layouts.MUTANTS if not m.honest], ids=lambda m: m.id)
def test_an_output_in_another_order_is_killed_by_its_check(mutant: Mutant) -> None:
    (result,) = _judge(mutant).results
    assert result.check in mutant.killed_by, result


def test_each_kind_of_leaving_out_has_rows() -> None:
    """Each part of judging a problem that can be left out has a mutant that only it kills."""
    assert {"weights", "constants", "seeds"} == {m.only for m in unvarying.MUTANTS} <= set(can_be_left_out())
    titles = " ".join(m.title for m in problem_controls.MUTANTS)
    for word in (
        *("torch.compile", "numba", "thread pool", "numpy", "random", "non-contiguous", "expanded"),
        *("dictionary", "named tuple", "scratch", "packed", "buffer", "chunks", "summed in blocks"),
    ):
        assert word in titles, word


def test_a_problem_has_no_implementation() -> None:
    with pytest.raises(TypeError, match="judged by its files"):
        mutants.find(unvarying.MUTANTS[0].id).make()
