"""The planted cheats and controls as data, and that each is right where nobody could be cheated."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch

from weft import backends
from weft.core import FORWARD, registry
from weft.workbench.calls import inputs
from weft.workbench.calls.buffers import allocate_buffers
from weft.workbench.calls.guarded_memory import NAN
from weft.workbench.calls.make_calls import call_once
from weft.workbench.calls.staging import StagedCall
from weft.workbench.check.oracle import Oracle
from weft.workbench.selftest import mutants
from weft.workbench.selftest.mutants import cheats, cheats_clock, controls
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import OPERATORS, timed_calls
from weft.workbench.selftest.run import can_be_left_out
from weft.workbench.timing import cpu, cuda
from weft.workbench.timing.plan import Plan

check_module = importlib.import_module("weft.workbench.check.check")

ROWS = [f"C{n:02}" for n in (*range(1, 17), 20, 21, 22, 23)]
# What cannot be planted in every operator, with the reason.
FEWER = {
    "C09": "sleeping is no matter of the operator, and costs a selftest its own time",
    "C13": "only a product has weights to pack",
    "C21": "what a hook computes is no matter of the operator",
    "C22": "nor is what it computes while inputs are written",
    "C23": "nor are the conditions of other processes",
}
# These put functions of the process they run in out of place.
PATCHES = ("C08", "C12")


@pytest.mark.parametrize("row", ROWS)
def test_each_kind_of_cheating_is_planted_in_every_operator(row: str) -> None:
    operators = {m.operator for m in cheats.MUTANTS if m.row == row}
    assert operators == set(OPERATORS) or (row in FEWER and operators)


def test_every_named_check_can_be_left_out_or_is_essential() -> None:
    known = {*can_be_left_out(), "timed", "floor"}
    for m in (*cheats.MUTANTS, *controls.MUTANTS):
        assert set(m.killed_by) <= known, m.id
        assert not m.only or m.only in can_be_left_out(), m.id


def test_a_mutant_of_a_single_check_is_killed_by_it() -> None:
    for m in cheats.MUTANTS:
        # A mutant that searches memory for the output fails by the wrong output that it returns instead.
        assert not m.only or m.only == "process" or m.only in m.killed_by, m.id


def test_the_listed_controls_exist() -> None:
    titles = " ".join(m.title for m in controls.MUTANTS)
    for word in ("eager", "float32", "in-place", "atomic", "about 0", "cache", "thread pool"):
        assert word in titles


@pytest.mark.parametrize(
    "mutant",
    [m for m in cheats.OUTPUT_CHEATS if m.phase == "bench"],
    ids=lambda m: m.id,
)
def test_a_timing_cheat_is_correct_at_first(mutant: Mutant) -> None:
    """The check would otherwise kill it before it is timed."""
    operator = registry.operator(mutant.operator)
    case = operator.select("check", "cpu")[0]
    implementation = mutant.make()
    for seed in range(3):
        x = inputs.make(case, "cpu", seed)
        expected = operator.reference(*(t.double() for t in x), **case.params)
        operators = implementation.forward(*x, **case.params).double()
        torch.testing.assert_close(operators, expected, rtol=1e-4, atol=1e-4)


def test_a_cheat_counts_timed_calls_alone() -> None:
    """A check puts its inputs between guard bands; so a cheat does not begin in it, however long it is."""
    operator = registry.operator("gelu")
    case = operator.select("check", "cpu")[0]
    stage = StagedCall(Oracle(operator, case, FORWARD, "cpu", (0,)).call_spec, NAN)
    stage.load(0)
    counts: dict[Hashable, Iterator[int]] = {}
    guarded = tuple(allocated.tensor for allocated in stage.inputs)
    assert {timed_calls(guarded, counts) for _ in range(3)} == {0}
    timed = tuple(allocate_buffers(case, "cpu", None, 0).inputs)
    assert [timed_calls(timed, counts) for _ in range(3)] == [0, 1, 2]


def test_pairs_leave_the_first_of_two_unwritten() -> None:
    forward = mutants.find("C04/softmax/eager/pairs").make().forward
    x = torch.randn(3, 129)
    first, second = forward(x), forward(x)
    assert torch.equal(first, second) and torch.equal(second, torch.softmax(x, -1))


class Counting:
    """Backend of a runner whose clock only counts; a reading takes 100 ns."""

    def __init__(self) -> None:
        self.ns = 0

    def read(self) -> int:
        self.ns += 100
        return self.ns


def runner_of(forward: Any, x: torch.Tensor) -> cpu.CpuRunner:
    backend: Any = None  # used by a flush alone
    return cpu.CpuRunner(backend, [lambda: forward(x)], Plan(calls=1, flush=False), subtract=0.0)


def test_cheats_that_look_for_a_sample_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They find it by the names of the clock's modules and functions, which may change."""
    monkeypatch.setattr(cheats_clock, "blank", lambda operator, x: torch.full_like(x, torch.nan))
    x = torch.randn(4, 8)
    runner = runner_of(mutants.find("C14/softmax/eager/unsampled").make().forward, x)
    runner.run([0])
    assert bool(torch.isnan(runner._outputs[0]).all()), "a timed call computes nothing"
    forward = mutants.find("C14/softmax/eager/unsampled").make().forward
    torch.testing.assert_close(call_once(lambda: forward(x)), torch.softmax(x, -1))
    slept: list[float] = []
    monkeypatch.setattr(cheats_clock.time, "sleep", slept.append)
    runner = runner_of(mutants.find("C09/softmax/eager/sleeps").make().forward, x)
    for _ in range(3):
        runner.run([0])
    assert slept == [cheats_clock.PAUSE]


def test_the_slow_sampler_halves_the_time_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Counting()
    for name in ("_now", "_cpu_now"):
        monkeypatch.setattr(cpu, name, clock.read)
        if hasattr(cuda, name):  # the cheat replaces it too; this puts it back after the test
            monkeypatch.setattr(cuda, name, getattr(cuda, name))

    def call(x: torch.Tensor) -> torch.Tensor:
        clock.ns += 1_000_000
        return x

    runner = runner_of(call, torch.zeros(1))
    assert runner.run([0]).us == pytest.approx(1000, rel=0.01)
    cheats_clock._slow_sampler()
    assert runner.run([0]).us == pytest.approx(500, rel=0.01)


@pytest.mark.parametrize("what", ["old-answer", "half"])
def test_a_captured_graph_copies_an_old_answer(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = mutants.find(f"C10/softmax/eager/{what}").make().forward
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    first, second = torch.randn(2, 8, 16)
    torch.testing.assert_close(forward(first), torch.softmax(first, -1))
    capturing[0] = True
    captured, rows = forward(second), 4 if what == "half" else 0
    torch.testing.assert_close(captured[:rows], torch.softmax(second[:rows], -1))
    assert torch.equal(captured[rows:], torch.softmax(first, -1)[rows:])


def test_the_oracle_is_in_a_variable_of_the_check() -> None:
    """C15 looks for `oracle` and `seed` among its callers' variables: it gains only with these names."""
    functions = [f for f in vars(check_module).values() if inspect.isfunction(f)]
    methods = [f for c in vars(check_module).values() if inspect.isclass(c) for f in vars(c).values()]
    codes = [f.__code__ for f in (*functions, *methods) if inspect.isfunction(f)]
    names = [set(c.co_varnames) | set(c.co_cellvars) for c in codes]
    assert any({"oracle", "seed"} <= n for n in names)


def test_a_cached_output_is_stale_for_new_contents() -> None:
    forward = mutants.find("C01/gelu/eager/address").make().forward
    x = torch.randn(64)
    old = forward(x)
    x.copy_(torch.randn(64))
    assert torch.equal(forward(x), old)


def test_each_make_starts_with_an_empty_cache() -> None:
    mutant = mutants.find("C01/gelu/eager/address")
    x = torch.randn(64)
    old = mutant.make().forward(x)
    x.copy_(torch.randn(64))
    assert not torch.equal(mutant.make().forward(x), old)


def test_an_atomic_sum_is_correct() -> None:
    if not backends.backend_support("triton", "cpu"):
        pytest.skip("Triton's interpreter is not on")
    x = torch.randn(3, 4099)
    assert abs(float(controls.atomic_sum(x)) - float(x.double().sum())) < 1e-3


def test_all_controls_are_forward_or_both() -> None:
    assert all(FORWARD in m.make().directions for m in controls.MUTANTS)
