"""Timing session: the number of samples, and threads that outlive a call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from weft.core import Input, case
from weft.machine.clocks import Sampler
from weft.workbench.calls.buffers import InputBuffers, allocate_buffers
from weft.workbench.timing.gpu_clocks import Readings
from weft.workbench.timing.integrity import ThreadMonitor
from weft.workbench.timing.plan import Budget, Candidate, Estimate, Plan
from weft.workbench.timing.session import TimingSession

POINT = case(Input(name="x", shape=(8, 8)))


def unavailable(buffers: InputBuffers) -> torch.Tensor:
    raise AssertionError("an external candidate is not called in the parent process")


class Steady:
    """Backend and prepared candidate in one; each sample advances a clock of its own."""

    is_local, flush, calls, audit_calls, overhead_us, slow_us, cache_bytes = False, False, 1, 1, 0.0, 1e6, 1

    def __init__(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.now, self.flags = seconds, 0.0, set[str]()
        self.plan = Plan(calls=1, flush=False)
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


def test_threads_of_torch_compile_are_its_own() -> None:
    from torch._inductor.compile_worker.timer import Timer

    threads = ThreadMonitor()
    timer = Timer(5, lambda: None)
    timer.record_call()
    stop = threading.Event()
    waiting = threading.Thread(target=stop.wait, name="mine", daemon=True)
    waiting.start()
    assert threads.new_threads() == {"mine"} and threads.new_threads() == set()
    stop.set()
    waiting.join()
    timer.quit()
