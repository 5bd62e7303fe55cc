"""The race: how many samples are taken, and whose the threads are that outlive a call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from weft.core import Input, case
from weft.machine.clocks import Sampler
from weft.workbench.guard import Threads
from weft.workbench.plan import Budget, Candidate, Estimate, Plan
from weft.workbench.race import Race
from weft.workbench.readings import Readings
from weft.workbench.slots import Slot, deal

POINT = case(Input(name="x", shape=(8, 8)))


def never(slot: Slot) -> torch.Tensor:
    raise AssertionError("a stranger's code is not called by the judge")


class Steady:
    """A stranger's stand and rig in one, whose samples take a given time of a clock of its own."""

    near, flush, calls, audited, overhead, slow, cache = False, False, 1, 1, 0.0, 1e6, 1

    def __init__(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.now, self.flags = seconds, 0.0, set[str]()
        self.plan = Plan(calls=1, flush=False)
        monkeypatch.setattr("weft.workbench.race._now", lambda: int(self.now * 1e9))

    def memory(self) -> int:
        return 1 << 30

    def estimate(self, *_: object) -> Estimate:
        return Estimate(us=self.seconds * 1e6, output_bytes=1)

    def entrant(self, *_: object) -> Any:
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
    stand: Any = Steady(seconds, monkeypatch)
    budget = Budget(seconds=0.12 if without else 0.5, warmup=0.0, minimum=20)
    make_slot = partial(deal, POINT, "cpu", None)
    candidates = [Candidate(name="it", bind=never, stand=stand)]
    race = Race(stand, candidates, make_slot, budget, 0, device="cpu", without=without)
    race.prepare()
    race.sample(Readings(Sampler("cpu")), None)
    assert race.troubles == {} and abs(len(race.courses[0].clean) - samples) <= 1


def test_threads_of_torch_compile_are_its_own() -> None:
    from torch._inductor.compile_worker.timer import Timer

    threads = Threads()
    timer = Timer(5, lambda: None)
    timer.record_call()
    stop = threading.Event()
    waiting = threading.Thread(target=stop.wait, name="mine", daemon=True)
    waiting.start()
    assert threads.newcomers() == {"mine"} and threads.newcomers() == set()
    stop.set()
    waiting.join()
    timer.quit()
