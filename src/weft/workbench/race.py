"""A race: candidates prepared, sampled in rounds of random order, cross-checked and re-checked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from weft.core import Timing
from weft.workbench.plan import (
    MOST_CALLS,
    SHORTEST,
    Budget,
    Candidate,
    CannotTime,
    Outcome,
    Rig,
    Stand,
    plan,
    replaced,
)
from weft.workbench.readings import Readings, is_throttled, summarise_clocks
from weft.workbench.recheck import MakeJudge, Recheck, turns
from weft.workbench.slots import MakeSlot, tensors_of
from weft.workbench.statistics import drift, is_steady, summarise

_now = time.perf_counter_ns

RETRIES = 20  # throttled samples of one candidate that are taken again
WINDOW = 5  # samples whose medians must agree before timing begins
OnRound = Callable[[int, Mapping[str, float]], None]


@dataclass(kw_only=True)
class Course:
    """A candidate on its way through the measurement."""

    candidate: Candidate
    rig: Rig
    clean: list[float] = field(default_factory=list)
    throttled: list[float] = field(default_factory=list)
    readings: list[dict[str, Any]] = field(default_factory=list)
    warm: float | None = None
    host: float | None = None
    rechecking: int = 0  # ns so far
    refusal: str = ""
    done: bool = False

    def take(self, readings: Readings | None) -> None:
        """One sample; kept with the reading beside it, where there is one."""
        us = self.rig.sample()
        if readings is None:
            return
        reading = readings.read()
        self.readings.append(reading)
        held = is_throttled(reading) and len(self.throttled) < RETRIES
        (self.throttled if held else self.clean).append(us)

    def finish(self, samples: int) -> None:
        """The numbers beside the headline, and the second clock."""
        self.warm = float(np.median([self.rig.warm() for _ in range(samples)]))
        self.host = float(np.median([self.rig.host() for _ in range(samples)]))
        self.rig.flags.update(self.rig.cross_check())

    def answer_to(self, recheck: Recheck) -> None:
        start = _now()
        self.refusal = recheck.candidate(self.rig) or ""
        self.rechecking += _now() - start


class Race:
    """The candidates of one case and direction, from preparing to their outcomes.

    A candidate that raises at any step leaves the race with its trouble; the others go on.
    """

    def __init__(
        self,
        stand: Stand,
        candidates: Sequence[Candidate],
        make_slot: MakeSlot,
        budget: Budget,
        seed: int,
    ) -> None:
        self.stand, self.candidates, self.make_slot = stand, candidates, make_slot
        self.budget, self.seed = budget, seed
        self.rng = np.random.default_rng(seed)
        self.threads = set(threading.enumerate())
        self.slots = [make_slot(seed)]
        self.courses: list[Course] = []
        self.troubles: dict[str, str] = {}

    def _try(self, name: str, step: Callable[[], None]) -> bool:
        """Whether a candidate's step went well; what it raised is kept as its trouble."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything
            self.troubles[name] = _trouble(error)
            return False
        return True

    @property
    def running(self) -> list[Course]:
        return [c for c in self.courses if c.candidate.name not in self.troubles]

    def prepare(self) -> None:
        """Bind every candidate to its slots, and run it until its times are steady."""
        for index, candidate in enumerate(self.candidates):
            self._try(candidate.name, partial(self._enter, candidate, index))

    def _enter(self, candidate: Candidate, index: int) -> None:
        first = self.slots[0]
        estimate = self.stand.estimate(candidate, first)
        output_bytes = sum(t.nbytes for t in tensors_of(candidate.bind(first)()))
        still_to_come = len(self.candidates) - index
        each = first.nbytes + still_to_come * output_bytes
        fits = max(1, int(0.6 * self.stand.memory() / max(1, each)))
        rig = self._steady_rig(candidate, estimate, first.nbytes + output_bytes, fits)
        self.courses.append(Course(candidate=candidate, rig=rig))

    def _steady_rig(self, candidate: Candidate, estimate: float, footprint: int, fits: int) -> Rig:
        """Plan, make the slots that are missing, warm up until two windows agree within 1 %.

        A candidate that was slow only at first gave a wrong estimate: where its samples turn out
        too short, the plan is made again from what they showed.
        """
        seconds = self.budget.warmup / len(self.candidates)
        for _ in range(3):
            planned = plan(
                footprint, self.stand.cache, estimate, slow_us=self.stand.slow, fits=fits
            )
            while len(self.slots) < planned.calls:
                self.slots.append(self.make_slot(self.seed + len(self.slots)))
            rig = self.stand.rig(candidate, self.slots[: planned.calls], planned)
            seen: list[float] = []
            until = _now() + int(seconds * 1e9)
            while len(seen) < 2 or (_now() < until and not is_steady(seen, WINDOW)):
                seen.append(rig.sample())
            steady = float(np.median(seen[-WINDOW:]))
            if steady * rig.calls >= SHORTEST or planned.calls >= min(MOST_CALLS, fits):
                break
            estimate = steady
        return rig

    def sample(self, readings: Readings, on_round: OnRound | None) -> None:
        """Rounds over all candidates in random order, until each is done or the budget spent."""
        until = _now() + int(self.budget.seconds * 1e9)
        for course in self.running:  # the first after another's warm-up is not like the others
            self._try(course.candidate.name, partial(course.take, None))
        for turn in range(self.budget.maximum):
            active = [c for c in self.running if not c.done]
            if not active or (_now() > until and turn > 1):
                break
            for index in self.rng.permutation(len(active)):
                course = active[index]
                self._try(course.candidate.name, partial(course.take, readings))
            for course in active:
                enough = len(course.clean) >= self.budget.minimum and turn % 5 == 4
                course.done = enough and summarise(course.clean).width < self.budget.width
            if on_round is not None:
                timed = (c for c in self.running if c.clean)
                on_round(turn, {c.candidate.name: float(np.median(c.clean)) for c in timed})

    def side_numbers(self) -> None:
        """``warm`` and ``host``, and whether two clocks agree on what was timed."""
        for course in self.running:
            self._try(course.candidate.name, partial(course.finish, self.budget.side_samples))
        names = sorted(t.name for t in set(threading.enumerate()) - self.threads)
        for course in self.running if names else ():
            course.rig.flags.add(f"threads: {', '.join(names)} not there before timing")

    def recheck(self, make_judge: MakeJudge) -> None:
        """Refill the slots and compare every candidate's timed path and plain calls, in turns."""
        if not self.running:
            return
        used = max(c.rig.calls for c in self.running)
        recheck = Recheck(self.slots[:used], self.make_slot, make_judge, self.seed)
        for turn in range(max(turns(c.rig.calls) for c in self.running)):
            recheck.load(turn)
            for course in self.running:
                tired = turn > 1 and course.rechecking > self.budget.recheck * 1e9
                if turn < turns(course.rig.calls) and not (course.refusal or tired):
                    self._try(course.candidate.name, partial(course.answer_to, recheck))

    def outcomes(self) -> dict[str, Outcome]:
        """One outcome a candidate, in the order they were given."""
        gone = replaced()
        found = {name: Outcome(trouble=trouble) for name, trouble in self.troubles.items()}
        for course in self.running:
            if gone:
                course.refusal = f"the clock's own functions were replaced: {', '.join(gone)}"
            found[course.candidate.name] = _outcome(course, self.stand, self.budget)
        return {c.name: found[c.name] for c in self.candidates}


def _trouble(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory"
    text = str(error).strip().splitlines()
    said = text[0] if text else ""
    return said if isinstance(error, CannotTime) else f"raised {type(error).__name__}: {said}"


def _outcome(course: Course, stand: Stand, budget: Budget) -> Outcome:
    if course.refusal:
        return Outcome(refusal=course.refusal)
    samples = course.clean or course.throttled
    found = summarise(samples)
    flags = set(course.rig.flags)
    if found.width >= budget.width or found.n < budget.minimum:
        flags.add("noisy")
    if course.throttled:
        flags.add("throttled")
    clocks = summarise_clocks(course.readings)
    if "sw_power_cap" in clocks.get("throttle", {}):
        flags.add("power-capped")
    clocks |= {
        "drift": round(drift(samples), 5),
        "flushed": course.rig.plan.flush,
        "overhead_us": round(stand.overhead, 3),
    }
    timing = Timing(
        cold=found.median,
        warm=course.warm,
        host=course.host,
        first=course.candidate.first,
        interval=found.interval,
        p10=found.p10,
        p90=found.p90,
        minimum=found.minimum,
        samples=(*course.clean, *course.throttled),
        calls_per_sample=course.rig.calls,
        throttled=len(course.throttled),
        flags=tuple(sorted(flags)),
        clocks=clocks,
    )
    return Outcome(timing=timing)
