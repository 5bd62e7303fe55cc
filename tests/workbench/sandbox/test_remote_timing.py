"""Timing of external candidates: the parent process checks the worker's times with its own clock."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from helpers import sampling
from helpers.fake_sandbox import POINT, FakeSandbox, Forward, compute, judge_of, unavailable
from helpers.toy_clock import ToyClock
from weft.core import Ceilings
from weft.workbench.calls.buffers import allocate_buffers
from weft.workbench.calls.errors import SandboxDied
from weft.workbench.sandbox import remote_timing
from weft.workbench.sandbox.process import Reply
from weft.workbench.sandbox.remote_timing import RemoteTimingBackend, describe_point
from weft.workbench.selftest.mutants.cheats_samples import LazyTensor, Samples
from weft.workbench.timing import composed_candidate
from weft.workbench.timing import cpu as cpu_timing
from weft.workbench.timing.measure import measure
from weft.workbench.timing.plan import Budget, Candidate, Outcome, timing_check_of

pytestmark = pytest.mark.usefixtures("small_machine")
QUICK = Budget(seconds=0.4, warmup=0.04, min_samples=8, max_rounds=20, side_samples=3, recheck_seconds=3.0)
DESCRIBED = describe_point("toy", "theirs", POINT.name, "forward", "cpu", None)
CEILINGS = Ceilings(device="toy", copy=1e12, read=1e12, fill=1e12, matrix={"fp32": 1e12}, measured="today")


WORK_US, COPY_US = 300.0, 10.0  # of the toy clock: a call that computes, and one that only copies


_clock: ToyClock | None = None
on_toy_clock = pytest.mark.usefixtures("clock")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyClock]:
    """Clock that the calls of this file advance, in place of the machine's."""
    global _clock
    _clock = ToyClock(monkeypatch)
    yield _clock
    _clock = None


def spend(us: float) -> None:
    """Advance the toy clock of the running test, if it has one."""
    if _clock is not None:
        _clock.advance(us)


def work(x: torch.Tensor) -> torch.Tensor:
    """Compute the output in 300 us of the toy clock, 30 times as long as a copy of it takes."""
    spend(WORK_US)
    return compute(x)


def time_candidate(
    forward: Forward,
    *,
    context: Callable[[], Any] = nullcontext,
    without: Sequence[str] = (),
    budget: Budget = QUICK,
    ours: Forward = work,
) -> dict[str, Outcome]:
    """Time an external candidate beside an implementation of this process."""
    return time_in(FakeSandbox(forward, context), without=without, budget=budget, ours=ours)


def time_in(
    sandbox: FakeSandbox, *, without: Sequence[str] = (), budget: Budget = QUICK, ours: Forward = work
) -> dict[str, Outcome]:
    # The toy clock replaces functions of the timing, which `replaced` would refuse.
    without = [*without, "replaced"]
    backend = RemoteTimingBackend(sandbox, DESCRIBED, "cpu", without)
    return measure(
        [
            Candidate(name="theirs", bind=unavailable, backend=backend),
            Candidate(name="ours", bind=lambda buffers: lambda: ours(buffers.inputs[0])),
        ],
        partial(allocate_buffers, POINT, "cpu", None),
        device="cpu",
        budget=budget,
        make_judge=judge_of,
        seed=None,
        without=without,
    )


def suspicions(outcomes: Outcome) -> list[str]:
    flags = outcomes.timing.flags if outcomes.timing else ()
    fields = [timing_check_of(f) for f in flags if f.startswith("suspect")]
    return [*fields, timing_check_of(outcomes.refusal)] if outcomes.refusal else fields


@on_toy_clock
def test_an_external_candidate_gets_every_number() -> None:
    outcomes = time_candidate(work)
    for one in outcomes.values():
        assert one.timing is not None, one
        assert suspicions(one) == [] and len(one.timing.samples) >= QUICK.min_samples
        assert one.timing.warm and one.timing.host and one.timing.clocks["fresh"] > 0


def caches_by(key: Callable[[torch.Tensor], object]) -> Forward:
    cache: dict[object, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        spend(COPY_US)
        cached = key(x)
        if cached not in cache:
            cache[cached] = work(x)
        return cache[cached].clone()

    return forward


def first_bytes(x: torch.Tensor) -> bytes:
    return x.flatten()[:16].numpy().tobytes()


def whole(x: torch.Tensor) -> float:
    return float(x.sum())


@on_toy_clock
@pytest.mark.parametrize("key", [first_bytes, whole])
def test_a_cache_by_contents_is_slower_on_unseen_inputs(key: Callable[..., object]) -> None:
    outcomes = time_candidate(caches_by(key), without=["altered"])
    assert "fresh" in suspicions(outcomes["theirs"]), outcomes["theirs"]
    assert outcomes["theirs"].timing is not None and suspicions(outcomes["ours"]) == []


def some_elements(x: torch.Tensor) -> float:
    return float(x.flatten()[::61].sum())


@on_toy_clock
@pytest.mark.parametrize("key", [first_bytes, some_elements])
def test_a_cache_by_a_part_of_the_contents_is_wrong_on_altered_inputs(key: Callable[..., object]) -> None:
    """Its output is wrong, whatever the clock says: here it is as fast as an honest one."""
    outcomes = time_candidate(caches_by(key), without=["fresh"])
    assert suspicions(outcomes["theirs"]) == ["altered"], outcomes["theirs"]
    assert "a few elements of its inputs changed" in outcomes["theirs"].refusal
    assert suspicions(outcomes["ours"]) == [] and outcomes["ours"].timing is not None


@on_toy_clock
def test_without_fresh_and_altered_a_cache_by_contents_survives() -> None:
    without = ["fresh", "altered"]
    assert suspicions(time_candidate(caches_by(first_bytes), without=without)["theirs"]) == []
    assert suspicions(time_candidate(caches_by(whole), without=["fresh"])["theirs"]) == []


def skips_after(calls: int) -> Forward:
    count = [0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] < calls:
            return work(x)
        spend(COPY_US)
        return torch.zeros_like(x)

    return forward


@on_toy_clock
def test_without_sampled_skipping_work_after_40_calls_is_refused_by_the_recheck_only() -> None:
    outcomes = time_candidate(skips_after(40), without=["sampled"])["theirs"]
    assert suspicions(outcomes) == ["recheck"] and "is wrong" in outcomes.refusal
    assert time_candidate(skips_after(40), without=["sampled", "recheck"])["theirs"].refusal == ""


@on_toy_clock
def test_calls_that_are_deferred_and_done_together_are_refused() -> None:
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        spend(COPY_US)
        waiting.append((x, torch.empty_like(x)))
        out = waiting[-1][1]
        if len(waiting) == 8:
            for x_deferred, out_deferred in waiting:
                out_deferred.copy_(work(x_deferred))
            waiting.clear()
        return out

    assert suspicions(time_candidate(forward, without=["sampled"])["theirs"]) == ["recheck"]


def lazy_after_40_calls() -> Forward:
    count = [0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] < 40:
            return work(x)
        spend(COPY_US)
        out = torch.empty_like(x).as_subclass(LazyTensor)
        out.work = lambda: compute(x)
        return out

    return forward


def wrong_in_samples() -> Forward:
    """Zeros until the contents of an input change: after the samples it is right."""
    samples = Samples()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(work(x)) if samples.has((x,)) else work(x)

    return forward


def with_a_profile_function() -> Forward:
    return lambda x: (sys.setprofile(lambda *_: None), work(x))[1]  # type: ignore[func-returns-value]


@on_toy_clock
@pytest.mark.parametrize(
    ("make", "check"),
    [(lazy_after_40_calls, "outputs"), (wrong_in_samples, "sampled"), (with_a_profile_function, "hooks")],
)
def test_a_cheat_in_the_samples_is_refused_by_one_check_only(make: Callable[[], Forward], check: str) -> None:
    before = sys.getprofile()
    try:
        outcomes = time_candidate(make())
        assert suspicions(outcomes["theirs"]) == [check], outcomes["theirs"]
        assert suspicions(outcomes["ours"]) == []
        sys.setprofile(before)
        # Inputs stay the same in a row of calls, too.
        assert suspicions(time_candidate(make(), without=[check, "rows"])["theirs"]) == []
    finally:
        sys.setprofile(before)


@on_toy_clock
def test_an_output_buffer_for_each_input_is_refused() -> None:
    cached: dict[int, torch.Tensor] = {}
    outcome = time_candidate(lambda x: cached.setdefault(x.data_ptr(), work(x)).copy_(compute(x)))["theirs"]
    assert suspicions(outcome) == ["outputs"] and "still in use" in outcome.refusal


@on_toy_clock
@pytest.mark.parametrize("size", [2, 40])
def test_a_ring_of_buffers_is_refused_where_a_sample_is_one_call(size: int) -> None:
    ring = itertools.cycle([torch.empty(160, 128) for _ in range(size)])

    def forward(x: torch.Tensor) -> torch.Tensor:
        spend(100_000.0)
        return next(ring).copy_(compute(x))

    outcome = time_candidate(forward)["theirs"]
    assert suspicions(outcome) in (["outputs"], ["rows"]), outcome
    assert "in use" in outcome.refusal or "returned the same memory" in outcome.refusal


@on_toy_clock
def test_a_longer_first_call_after_new_contents_is_not_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads sleep and its page tables have left the cache. An audit has other calls besides."""
    monkeypatch.setattr(composed_candidate, "AUDIT_BYTES", 0)  # contents so large that few calls get new ones
    is_first = [False]

    def evict(backend: object) -> None:
        is_first[0] = True

    monkeypatch.setattr(cpu_timing.CpuTimingBackend, "evict", evict)

    def forward(x: torch.Tensor) -> torch.Tensor:
        spend(570.0 + 330.0 * is_first[0])
        is_first[0] = False
        return compute(x)

    outcomes = time_candidate(forward, ours=forward)
    for name in ("theirs", "ours"):
        assert suspicions(outcomes[name]) == [], outcomes[name]


@on_toy_clock
def test_every_timed_call_has_the_same_callers() -> None:
    """Samples, audits, re-checks, warm calls and repeats: the same functions at the same lines."""
    stacks: set[tuple[tuple[str, int], ...]] = set()

    def forward(x: torch.Tensor) -> torch.Tensor:
        frame, stack = sys._getframe(1), []
        while frame.f_back is not None and frame.f_code.co_name != "request":
            stack.append((frame.f_code.co_name, frame.f_lineno))
            frame = frame.f_back
        # The estimate and the binding come once, before the first timed call.
        if all(name != "estimate" for name, _ in stack):
            stacks.add(tuple(stack))
        return work(x)

    sandbox = FakeSandbox(forward)
    cold: set[str] = set()
    real = sandbox.request

    def request(verb: str, payload: Any = None, *rest: Any, **more: Any) -> Reply:
        if verb == "timing.run" and payload["mode"] == "cold":
            cold.add(json.dumps(payload))
        return real(verb, payload, *rest, **more)

    sandbox.request = request  # type: ignore[method-assign]
    outcome = time_in(sandbox)["theirs"]
    assert outcome.timing is not None and suspicions(outcome) == []
    assert len(stacks) == 1, stacks
    assert sandbox.verbs_called.count("timing.evict") >= 2, "there were audits"
    # Those of the three plans at most, which differ in the number of calls: one for each plan.
    assert len({len(json.loads(c)["indexes"]) for c in cold}) == len(cold), cold


def slow_when_compared() -> Forward:
    """Look answers up, but not in the first calls on new contents, with which an audit was once compared."""
    answers: dict[float, torch.Tensor] = {}
    calls: dict[float, int] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        key = whole(x)
        calls[key] = calls.get(key, 0) + 1
        if calls[key] <= 4:
            answers[key] = work(x)
            return answers[key].clone()
        spend(COPY_US)
        return answers[key].clone()

    return forward


@on_toy_clock
def test_slow_calls_on_new_contents_gain_nothing() -> None:
    outcome = time_candidate(slow_when_compared(), without=["altered"])["theirs"]
    assert outcome.timing is not None, outcome
    assert "fresh" in suspicions(outcome) or outcome.timing.cold > 0.6 * WORK_US, outcome


class Slowed:
    """The clock of the samples runs at a tenth of its speed while the worker answers."""

    def __enter__(self) -> None:
        self.real, began = cpu_timing._now, cpu_timing._now()
        real = self.real
        cpu_timing._now = lambda: began + (real() - began) // 10

    def __exit__(self, *_: object) -> None:
        cpu_timing._now = self.real


@on_toy_clock
def test_a_tenfold_too_short_time_is_seen_by_the_parents_clock() -> None:
    outcomes = time_candidate(work, context=Slowed, without=["replaced"])
    assert "wall" in suspicions(outcomes["theirs"]), outcomes["theirs"]
    assert suspicions(outcomes["ours"]) == []


class HalfSpeed:
    """A worker whose clock has run at half speed since its start."""

    def __init__(self) -> None:
        self.real, began = cpu_timing._now, cpu_timing._now()
        real = self.real
        self.slow = lambda: began + (real() - began) // 2

    def __call__(self) -> HalfSpeed:
        return self

    def __enter__(self) -> None:
        cpu_timing._now = self.slow

    def __exit__(self, *_: object) -> None:
        cpu_timing._now = self.real


@on_toy_clock
@pytest.mark.parametrize("half", [False, True])
def test_the_readings_of_a_slow_clock_fall_behind_whatever_the_load(
    half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = remote_timing.RemoteTimedCandidate
    monkeypatch.setattr(candidate, "_compare_wall_time", lambda self, *args, **named: [])
    context = HalfSpeed() if half else nullcontext
    outcomes = time_candidate(work, context=context, without=["clocks", "fresh"])
    assert suspicions(outcomes["theirs"]) == (["wall"] if half else [])


@on_toy_clock
def test_without_wall_a_tenfold_too_short_time_survives() -> None:
    outcomes = time_candidate(work, context=Slowed, without=["replaced", "wall", "clocks"])["theirs"]
    assert suspicions(outcomes) == [] and outcomes.timing is not None


def test_a_worker_whose_clock_was_replaced_is_refused() -> None:
    sandbox = FakeSandbox(work)
    sandbox.verbs["timing.replaced_functions"] = lambda payload, _: ({"replaced": ["time.sleep"]}, ())  # type: ignore[index]
    backend = RemoteTimingBackend(
        sandbox, describe_point("toy", "theirs", POINT.name, "forward", "cpu", None), "cpu"
    )
    outcomes = measure(
        [Candidate(name="it", bind=unavailable, backend=backend)],
        partial(allocate_buffers, POINT, "cpu", None),
        device="cpu",
        budget=QUICK,
        seed=None,
    )["it"]
    assert suspicions(outcomes) == ["replaced"] and "time.sleep" in outcomes.refusal


@on_toy_clock
@pytest.mark.parametrize("computes", [True, False])
def test_a_thread_is_suspect_if_it_works_after_the_call(computes: bool) -> None:
    stop = threading.Event()

    def later() -> None:
        while not stop.wait(0.0 if computes else None):
            sum(range(1000))

    threads: list[threading.Thread] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not threads:
            threads.append(threading.Thread(target=later, name="later\x1b[2K", daemon=True))
            threads[0].start()
        return work(x)

    few = Budget(seconds=0.1, warmup=0.01, min_samples=3, max_rounds=4, side_samples=1, recheck_seconds=1.0)
    # A row of calls beside a thread that holds the interpreter's lock takes half a minute.
    outcomes = time_candidate(forward, budget=few, without=["rows"])["theirs"]
    stop.set()
    assert outcomes.timing is not None, outcomes
    assert ("threads" in suspicions(outcomes)) == computes, outcomes.timing.flags
    # The candidate chose the name: it must not steer the terminal.
    named = any("threads: later\\x1b[2K worked" in f for f in outcomes.timing.flags)
    assert named == computes, outcomes.timing.flags


@pytest.mark.parametrize(("slept_us", "suspect"), [(50_000.0, True), (20.0, False)])
def test_sleeping_through_the_budget_leaves_too_few_samples(
    slept_us: float, suspect: bool, clock: ToyClock
) -> None:
    """A call takes 20 us in the first samples and 50 ms in the later ones: 20 samples of 13 calls fit
    in the budget at its best speed, and it takes half of them."""
    calls = [0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        clock.advance(20.0 if calls[0] <= 300 else slept_us)
        return compute(x)

    few = Budget(seconds=0.2, warmup=0.02, min_samples=20, max_rounds=60, side_samples=1, recheck_seconds=0.5)
    backend = RemoteTimingBackend(
        FakeSandbox(forward), describe_point("toy", "theirs", POINT.name, "forward", "cpu", None), "cpu"
    )
    outcome = measure(
        [Candidate(name="theirs", bind=unavailable, backend=backend)],
        partial(allocate_buffers, POINT, "cpu", None),
        device="cpu",
        budget=few,
        seed=None,
        without=["replaced", "fresh", "clocks", "wall"],
    )["theirs"]
    assert ("samples" in suspicions(outcome)) == suspect, outcome
    assert outcome.timing is not None and (len(outcome.timing.samples) < 20) == suspect


@pytest.mark.parametrize("sleeps", [True, False])
def test_few_samples_are_suspect_if_the_worker_slept_and_not_if_the_machine_was_busy(
    sleeps: bool, clock: ToyClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls become 2500 times slower. The worker sleeps meanwhile, or it waits for a core."""
    calls, scheduled = [0], [0.0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        us = 20.0 if calls[0] <= 300 else 50_000.0
        clock.advance(us)
        scheduled[0] += 20e-6 if sleeps else us / 1e6
        return compute(x)

    sandbox = FakeSandbox(forward)
    sandbox.pid = os.getpid()  # type: ignore[attr-defined]
    monkeypatch.setattr(remote_timing, "scheduled_seconds", lambda pid: scheduled[0])
    few = Budget(seconds=0.2, warmup=0.02, min_samples=20, max_rounds=60, side_samples=1, recheck_seconds=0.5)
    outcome = measure(
        [Candidate(name="theirs", bind=unavailable, backend=RemoteTimingBackend(sandbox, DESCRIBED, "cpu"))],
        partial(allocate_buffers, POINT, "cpu", None),
        device="cpu",
        budget=few,
        seed=None,
        without=["replaced", "fresh", "clocks", "wall"],
    )["theirs"]
    assert outcome.timing is not None and len(outcome.timing.samples) < 20
    assert "noisy" in outcome.timing.flags
    assert suspicions(outcome) == (["samples"] if sleeps else [])


def test_the_end_of_a_worker_is_reported_and_the_others_are_timed() -> None:
    sandbox = FakeSandbox(work)
    real = sandbox.request

    def request(verb: str, *rest: Any, **more: Any) -> Reply:
        if verb == "timing.run" and sandbox.verbs_called.count(verb) > 5:
            raise SandboxDied("was killed by SIGSEGV")
        return real(verb, *rest, **more)

    sandbox.request = request  # type: ignore[method-assign]
    backend = RemoteTimingBackend(
        sandbox, describe_point("toy", "theirs", POINT.name, "forward", "cpu", None), "cpu"
    )
    outcomes = measure(
        [
            Candidate(name="theirs", bind=unavailable, backend=backend),
            Candidate(name="ours", bind=lambda buffers: lambda: work(buffers.inputs[0])),
        ],
        partial(allocate_buffers, POINT, "cpu", None),
        device="cpu",
        budget=QUICK,
        make_judge=judge_of,
        seed=None,
    )
    assert outcomes["theirs"].trouble == "its process was killed by SIGSEGV"
    assert outcomes["ours"].timing is not None


def test_a_worker_gets_contents_and_never_a_seed() -> None:
    firsts: list[list[float]] = []
    for _ in range(2):
        sandbox, loaded = FakeSandbox(work), []
        real = sandbox.request

        def request(
            verb: str,
            payload: Any = None,
            tensors: Any = (),
            real: Any = real,
            loaded: Any = loaded,
            **_: Any,
        ) -> Reply:
            assert "seed" not in str(payload), payload
            loaded += [float(t.flatten()[0]) for t in tensors]
            return real(verb, payload, tensors)  # type: ignore[no-any-return]

        sandbox.request = request  # type: ignore[method-assign]
        backend = RemoteTimingBackend(sandbox, DESCRIBED, "cpu")
        candidate = Candidate(name="it", bind=unavailable, backend=backend)
        make_buffers = partial(allocate_buffers, POINT, "cpu", None)
        measure([candidate], make_buffers, device="cpu", budget=QUICK, make_judge=judge_of, seed=None)
        firsts.append(loaded)
    assert not set(firsts[0]) & set(firsts[1]) and len(set(firsts[0])) > 2


@on_toy_clock
def test_honest_implementations_are_never_suspect() -> None:
    """Each call takes up to a fifth longer than the quickest, and one in fifty is interrupted for 3 ms."""
    generator = random.Random()
    numbers = sampling.sample(range(15), 6, "honest timings")

    def busy_work(x: torch.Tensor) -> torch.Tensor:
        spend(WORK_US * (1.0 + 0.2 * generator.random()) + (3000.0 if generator.random() < 0.02 else 0.0))
        return compute(x)

    few = Budget(seconds=0.1, warmup=0.01, min_samples=5, max_rounds=8, side_samples=1, recheck_seconds=0.2)
    sessions = []
    for number in numbers:
        generator.seed(number)
        sessions.append(time_candidate(busy_work, ours=busy_work, budget=few))
    alarms = [s for outcomes in sessions for one in outcomes.values() for s in suspicions(one)]
    print(f"{2 * len(numbers)} honest timings, {len(alarms)} alarms")
    assert alarms == []
