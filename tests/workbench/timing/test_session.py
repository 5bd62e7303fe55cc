"""Timing session: the number of samples, and threads that work after a call."""

from __future__ import annotations

import _thread
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.core import Input, case
from weft.machine.clocks import Sampler
from weft.workbench.calls.buffers import InputBuffers, allocate_buffers
from weft.workbench.sandbox import remote_timing
from weft.workbench.timing import threads
from weft.workbench.timing.gpu_clocks import Readings
from weft.workbench.timing.local_candidate import BufferCache
from weft.workbench.timing.plan import (
    CHECKS,
    Budget,
    Candidate,
    ContentSource,
    Estimate,
    Plan,
    timing_check_of,
)
from weft.workbench.timing.recheck import Recheck
from weft.workbench.timing.session import TimingSession
from weft.workbench.timing.threads import ThreadMonitor

POINT = case(Input(name="x", shape=(8, 8)))


def unavailable(buffers: InputBuffers) -> torch.Tensor:
    raise AssertionError("an external candidate is not called in the parent process")


class Steady:
    """Backend and prepared candidate in one; each sample advances a clock of its own."""

    is_local, flush, calls, audit_calls, overhead_us, slow_us, cache_bytes = False, False, 1, 1, 0.0, 1e6, 1

    def __init__(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.now, self.flags = seconds, 0.0, set[str]()
        self.plan, self.sources = Plan(calls=1, flush=False), [ContentSource(0)]
        monkeypatch.setattr("weft.workbench.timing.session._now", lambda: int(self.now * 1e9))

    def available_memory(self) -> int:
        return 1 << 30

    def estimate(self, *_: object) -> Estimate:
        return Estimate(us=self.seconds * 1e6, output_bytes=1)

    def prepare(self, *_: object) -> Any:
        return self

    def sample(self) -> float:
        self.now += self.seconds
        return self.seconds * 1e6

    def sample_unseen(self, seeds: Sequence[int]) -> float:
        return self.seconds * 1e6

    def lazy_memory(self, indexes: object) -> str:
        return ""

    def sampled_outputs(self) -> Steady:
        return self

    def pick(self, indexes: Sequence[int]) -> dict[int, torch.Tensor]:
        return {i: torch.zeros(1) for i in indexes}


@pytest.mark.parametrize(
    ("seconds", "without", "samples"),
    [(0.05, (), 20), (0.05, ("samples",), 3), (0.001, (), 20), (0.4, (), 4)],
)
def test_the_least_number_of_samples_is_taken_past_the_seconds_within_reason(
    seconds: float, without: Sequence[str], samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget of half a second has room for 10 samples of 50 ms, of which 20 are due; at most
    1.5 s are spent on it."""
    backend: Any = Steady(seconds, monkeypatch)
    budget = Budget(seconds=0.12 if without else 0.5, warmup=0.0, min_samples=20)
    make_buffers = partial(allocate_buffers, POINT, "cpu", None)
    candidates = [Candidate(name="it", bind=unavailable, backend=backend)]
    session = TimingSession(backend, candidates, make_buffers, budget, 0, device="cpu", without=without)
    session.prepare()
    session.sample(Readings(Sampler("cpu")), None)
    assert session.troubles == {} and abs(len(session.states[0].clean) - samples) <= 1


def test_memory_that_runs_out_in_the_re_check_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = Steady(0.05, monkeypatch)
    candidates = [Candidate(name="it", bind=unavailable, backend=backend)]
    make_buffers = partial(allocate_buffers, POINT, "cpu", None)
    session = TimingSession(backend, candidates, make_buffers, Budget(seconds=0.2), 0, device="cpu")
    session.prepare()
    session.sample(Readings(Sampler("cpu")), None)

    def rerun(*_: object) -> Any:
        raise torch.OutOfMemoryError

    backend.rerun = rerun
    session.recheck(lambda buffers: lambda outputs: None)
    assert session.troubles == {"it": "out of memory"} and session.running == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs a clock for each thread")
def test_threads_are_judged_by_the_time_that_they_use() -> None:
    from torch._inductor.compile_worker.timer import Timer

    stop, work = threading.Event(), threading.Event()

    def compute() -> None:
        while not stop.is_set():
            work.wait()
            sum(range(1000))

    def names_after_work() -> set[str]:
        work.set()
        for _ in range(200):  # at once on a quiet machine
            time.sleep(0.02)
            monitor.begin_step()
            if names := monitor.working_threads():
                break
        work.clear()
        return names

    monitor = ThreadMonitor()
    timer = Timer(5, lambda: None)  # torch.compile's own, which waits
    timer.record_call()
    thread = threading.Thread(target=compute, name="mine", daemon=True)
    try:
        threading.Thread(target=stop.wait, daemon=True).start()
        thread.start()
        for _ in range(3):  # the thread works, but only while a step runs
            monitor.begin_step()
            work.set()
            time.sleep(0.02)
            work.clear()
            time.sleep(0.005)
            assert monitor.working_threads() == set()
        assert "mine" in names_after_work()
        monitor.accept_current()  # it belongs to the previous candidate
        _thread.start_new_thread(compute, ())  # not listed by `threading`
        assert names_after_work() == {"a thread"}
    finally:
        stop.set()
        work.set()
        thread.join()
        timer.quit()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a clock for each thread")
def test_a_pool_that_waits_again_is_accepted_after_many_steps() -> None:
    monitor = ThreadMonitor()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(600):  # with clocks of the system, beside whatever the machine does
            monitor.begin_step()
            list(pool.map(int, range(2)))
            assert monitor.working_threads() == set()
            time.sleep(0.0002)
        assert monitor._n_returns > 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs a clock for each thread")
@pytest.mark.parametrize(
    ("turn_us", "used_us", "named"),
    [
        (20, 15, False),
        (90, 70, False),  # a busy machine: its caches are cold
        (20, 60, True),  # three times as much as a thread without work
        (1000, 99, False),
        (1000, 120, True),  # a slowed comparison excuses no more than one busy pause has
    ],
)
def test_work_after_steps_is_what_a_thread_without_work_does_not_use(
    monkeypatch: pytest.MonkeyPatch, turn_us: int, used_us: int, named: bool
) -> None:
    cpu: Counter[int] = Counter()
    monkeypatch.setattr(threads, "_cpu_ns", lambda thread: cpu[thread])
    monitor, stop = ThreadMonitor(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="mine")
    thread.start()
    try:
        assert thread.native_id is not None
        names: set[str] = set()
        for _ in range(400):
            monitor.begin_step()
            names |= monitor.working_threads()
            cpu[thread.native_id] += used_us * 1000
            assert monitor._idle_pool is not None
            cpu[monitor._idle_pool.thread] += turn_us * 1000
        assert names == ({"mine"} if named else set())
    finally:
        stop.set()
        thread.join()


def test_the_time_of_a_process_is_that_of_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for thread, text in (("7", "1500000000 250000000 9\n"), ("8", "250000000 0 1\n")):
        (tmp_path / "7/task" / thread).mkdir(parents=True)
        (tmp_path / "7/task" / thread / "schedstat").write_text(text)
    monkeypatch.setattr(remote_timing, "PROC", tmp_path)
    assert remote_timing.scheduled_seconds(7) == pytest.approx(2.0)
    assert remote_timing.scheduled_seconds(None) is remote_timing.scheduled_seconds(9) is None


def test_the_remote_outputs_to_compare_are_unpredictable() -> None:
    contents = BufferCache(partial(allocate_buffers, POINT, "cpu", None))
    recheck = Recheck(range(100), contents, lambda buffers: lambda outputs: None, [1, 2], backward=False)
    seen = set()
    for turn in range(20):
        recheck.begin_round(turn)
        chosen = recheck.compared_calls(100, is_local=False)
        assert {0, 99} <= set(chosen) and 2 <= len(chosen) <= 13
        assert recheck.compared_calls(100, is_local=True) == list(range(100))
        seen |= set(chosen)
    assert len(seen) > 40


class Output:
    """Yield the outputs of a run with one call in another process."""

    label, judged = "timed", None

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return 1

    def pick(self, indexes: Sequence[int]) -> dict[int, torch.Tensor]:
        return dict.fromkeys(indexes, self.tensor)

    def buffer_of(self, call: int) -> int:
        return call


def test_an_equal_large_output_is_judged_once_for_each_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.workbench.timing.recheck.MAX_KEPT_BYTES", 1)
    judged = []

    def make_judge(buffers: InputBuffers) -> Any:
        def decide(outputs: torch.Tensor) -> str | None:
            judged.append(outputs)
            return None if outputs.equal(buffers.inputs[0]) else "wrong"

        return decide

    contents = BufferCache(partial(allocate_buffers, POINT, "cpu", None))
    recheck = Recheck([0], contents, make_judge, [1, 2], backward=False)
    for turn in range(4):
        recheck.begin_round(turn)
        right = Output(contents(1 + turn % 2).inputs[0].clone())
        assert recheck._verify(right, False) is recheck._verify(right, False) is None
        stale = Output(contents(2 - turn % 2).inputs[0].clone())
        assert "wrong" in (recheck._verify(stale, False) or "")
    assert sum(bool(o.equal(contents(1).inputs[0])) for o in judged) == 1 + 2  # right once, and stale twice


def test_every_timing_check_has_a_name() -> None:
    assert {timing_check_of(begins[0]) for begins in CHECKS.values()} == set(CHECKS)
    assert timing_check_of("noisy") == "" and timing_check_of("suspect: faster than the floor") == ""
