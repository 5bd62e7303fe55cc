"""Conditions of processes are compared, not required, and a reference is sampled twice in each round."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from weft.core import Input, case
from weft.machine.clocks import Sampler
from weft.workbench.calls.buffers import allocate_buffers
from weft.workbench.timing.conditions import (
    Conditions,
    ConditionsMonitor,
    ThreadConditions,
    describe_advantage,
    describe_change,
    read,
)
from weft.workbench.timing.gpu_clocks import Readings
from weft.workbench.timing.plan import Budget, Candidate, ContentSource, Estimate, Plan
from weft.workbench.timing.session import TimingSession

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and sched_setscheduler")


def conditions(**changes: Any) -> Conditions:
    usual = {"cores": frozenset({0, 1}), "niceness": 0, "policy": 0, "priority": 0}
    return Conditions({7: ThreadConditions(**usual | changes)})


def test_only_conditions_that_favour_the_candidate_are_reported() -> None:
    one_core, usual = conditions(cores=frozenset({0})), conditions()
    assert describe_change(usual, usual) == describe_advantage(usual, usual) == ""
    assert describe_change(usual, one_core) == "core 0 instead of cores 0, 1"
    assert describe_change(usual, conditions(niceness=5)) == "niceness 5 instead of 0"
    assert "SCHED_IDLE instead of SCHED_OTHER" in describe_change(usual, conditions(policy=5))
    assert describe_change(usual, Conditions()) == ""  # a thread that ended
    assert "core 1, which the reference may not" in describe_advantage(usual, one_core)
    assert "niceness -5" in describe_advantage(conditions(niceness=-5), usual)
    assert "priority 9" in describe_advantage(conditions(policy=1, priority=9), usual)
    # A candidate may change its own process only, and a user may set the CPU affinity of all.
    for own in (one_core, conditions(niceness=5), conditions(policy=5)):
        assert describe_advantage(own, usual) == describe_advantage(own, own) == ""


class Process:
    """Worker process that sleeps. It is never paused, and reports ``paused_cpu_seconds``."""

    def __init__(self) -> None:
        self.parent_conditions = read(os.getpid())
        self.process = subprocess.Popen(["sleep", "60"])
        self.pid, self.paused_cpu_seconds = self.process.pid, 0.0
        self.start_conditions = [read(self.pid)]

    def pause(self) -> None: ...


@pytest.fixture
def workers() -> Iterator[dict[str, Process]]:
    workers = {"mine": Process(), "reference": Process()}
    yield workers
    for worker in workers.values():
        worker.process.kill()
        worker.process.wait()


def make_idle(pid: int) -> None:
    os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))


@linux
def test_a_change_of_another_process_is_the_candidates_violation(workers: dict[str, Process]) -> None:
    monitor = ConditionsMonitor(workers, ["reference"])
    make_idle(workers["mine"].pid)
    monitor.end_turn("mine")
    monitor.end_turn("reference")
    assert monitor.violations == {}
    make_idle(workers["reference"].pid)
    monitor.end_turn("mine")
    assert "the reference's process has scheduling policy SCHED_BATCH" in monitor.violations["mine"]
    assert os.sched_getscheduler(workers["reference"].pid) == os.SCHED_OTHER  # restored


@linux
def test_conditions_from_before_the_session_are_compared(workers: dict[str, Process]) -> None:
    workers["reference"].start_conditions.append(conditions(niceness=19))
    monitor = ConditionsMonitor(workers, ["reference"])
    assert "the reference's process began with" in monitor.violations["mine"]
    workers["reference"].start_conditions.pop()
    workers["mine"].paused_cpu_seconds = 0.5
    monitor = ConditionsMonitor(workers, ["reference"])
    assert monitor.violations == {}
    monitor.watch_stopped()
    assert "ran for 500 ms" in monitor.violations["mine"]


class Counting:
    """Backend and candidate in one, whose calls take 1 ms and are counted."""

    is_local, flush, calls, audit_calls, overhead_us, slow_us, cache_bytes = False, False, 1, 1, 0.0, 1e6, 1
    plan, asleep_seconds, sources = Plan(calls=1, flush=False), None, (ContentSource(0),)

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order, self.flags, self.looked = name, order, set[str](), 0

    def available_memory(self) -> int:
        return 1 << 30

    def estimate(self, *_: object) -> Estimate:
        return Estimate(us=1000.0, output_bytes=1)

    def prepare(self, *_: object) -> Any:
        return self

    def sample(self) -> float:
        self.order.append(self.name)
        return 1000.0 + len(self.order) % 7 * 100.0

    sample_warm = sample_host = sample

    def lazy_memory(self, indexes: object) -> str:
        return ""

    def sampled_outputs(self) -> Counting:
        return self

    def pick(self, indexes: list[int]) -> dict[int, torch.Tensor]:
        self.looked += 1
        return {index: torch.zeros(1) for index in indexes}


def test_a_reference_is_sampled_twice_in_each_round_and_not_examined() -> None:
    order: list[str] = []
    backends: dict[str, Any] = {name: Counting(name, order) for name in ("reference", "mine")}
    candidates = [
        Candidate(name=name, bind=lambda b: lambda: b.inputs[0], backend=b, trusted=name == "reference")
        for name, b in backends.items()
    ]
    point = case(Input(name="x", shape=(8, 8)))
    budget = Budget(seconds=60.0, warmup=0.0, min_samples=20, max_rounds=40)
    make_buffers = partial(allocate_buffers, point, "cpu", None)
    options = {"device": "cpu", "without": ("fresh",)}  # an audit would add samples of its own
    session = TimingSession(backends["mine"], candidates, make_buffers, budget, 0, **options)
    session.prepare()
    del order[:]
    session.sample(Readings(Sampler("cpu")), None)
    reference, mine = session.states
    assert len(reference.clean) == len(reference.repeated) == len(mine.clean) == 40 and mine.repeated == []
    rounds = [tuple(order[n : n + 3]) for n in range(2, len(order), 3)]
    assert {tuple(sorted(r)) for r in rounds} == {("mine", "reference", "reference")}
    assert len(set(rounds)) == 3, "the places in a round are random"
    assert backends["mine"].looked and not backends["reference"].looked and session.doubted == [mine]
