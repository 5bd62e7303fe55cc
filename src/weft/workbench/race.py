"""A race: candidates prepared, sampled in rounds of random order, cross-checked and re-checked."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from weft.core import Timing
from weft.workbench.cell import CellDied, GuestError
from weft.workbench.fresh import Fresh
from weft.workbench.guard import Threads
from weft.workbench.local_rig import Contents
from weft.workbench.plan import (
    BUSIEST,
    BUSY,
    MOST_CALLS,
    PATIENCE,
    SHORTEST,
    Budget,
    Candidate,
    CannotTime,
    Entrant,
    Outcome,
    Stand,
    check_of,
    plan,
)
from weft.workbench.readings import Readings, is_throttled, summarise_clocks
from weft.workbench.recheck import CONTENTS, MakeJudge, Recheck, turns
from weft.workbench.slots import MakeSlot, Slot
from weft.workbench.statistics import drift, is_steady, summarise

_now = time.perf_counter_ns

RETRIES = 20  # throttled samples of one candidate that are taken again
WINDOW = 5  # samples whose medians must agree before timing begins
RECHECKED, AUDITED = 7_000_000, 9_000_000  # where the seeds of contents begin, if any can be known
OnRound = Callable[[int, Mapping[str, float]], None]


@dataclass(kw_only=True)
class Course:
    """A candidate on its way through the measurement."""

    candidate: Candidate
    rig: Entrant
    clean: list[float] = field(default_factory=list)
    throttled: list[float] = field(default_factory=list)
    readings: list[dict[str, Any]] = field(default_factory=list)
    warm: float | None = None
    host: float | None = None
    fresh: float | None = None
    least: float = float("inf")  # us of a call, of any sample that was taken
    sampling: float = 0.0  # seconds so far
    rechecking: int = 0  # ns so far
    refusal: str = ""
    done: bool = False

    @property
    def cold(self) -> float:
        return float(np.median(self.clean or self.throttled))

    def busy(self, device: str) -> float:
        """How many times the headline a call may take a moment later on a machine as unsteady as
        the samples are."""
        width = summarise(self.clean or self.throttled).width
        return min(BUSIEST, BUSY[device] * (1.0 + 4.0 * width))

    def take(self, readings: Readings | None) -> None:
        """One sample; kept with the reading beside it, where there is one."""
        start = _now()
        us = self.rig.sample()
        self.sampling += (_now() - start) / 1e9
        self.least = min(self.least, us)
        if readings is None:
            return
        reading = readings.read()
        self.readings.append(reading)
        held = is_throttled(reading) and len(self.throttled) < RETRIES
        (self.throttled if held else self.clean).append(us)

    def may_go_on(self, budget: Budget) -> bool:
        """A stranger is given its samples whatever the others in the race have spent."""
        return self.candidate.stand is not None and self.sampling < PATIENCE * budget.seconds

    def dawdled(self, budget: Budget) -> bool:
        """Whether a stranger took fewer samples than it had the time for, at its best by far."""
        if self.candidate.stand is None or len(self.clean) >= budget.minimum:
            return False
        at_best = budget.minimum * self.rig.calls * self.least / 1e6
        return BUSIEST * at_best < PATIENCE * budget.seconds

    def finish(self, samples: int, device: str) -> None:
        """The numbers beside the headline, and the second clock."""
        self.warm = float(np.median([self.rig.warm() for _ in range(samples)]))
        self.host = float(np.median([self.rig.host() for _ in range(samples)]))
        self.rig.flags.update(self.rig.cross_check(self.cold, self.busy(device)))

    def audit(self, fresh: Fresh, device: str) -> None:
        """Timed once more on contents that it cannot have seen."""
        best = min(self.clean or self.throttled)
        found = fresh.candidate(self.rig, best, self.busy(device))
        if found.refusal:
            self.refusal = f"recheck: {found.refusal}"
        elif found.least is None:
            self.rig.flags.add("suspect: never timed on contents it had not seen")
        if found.least is None:
            return
        self.fresh = found.least / best if best else None
        if found.slower:
            self.rig.flags.add(
                "suspect: slower on contents it had not seen: "
                f"{found.least:.1f} us against {best:.1f} us"
            )

    def answer_to(self, recheck: Recheck) -> None:
        start = _now()
        reason = recheck.candidate(self.rig)
        self.refusal = f"recheck: {reason}" if reason else ""
        self.rechecking += _now() - start

    def own_up(self) -> None:
        """Whether the clock's functions, in the process where it was timed, are still its own."""
        if gone := self.rig.replaced():
            self.refusal = f"replaced: the clock's own functions: {', '.join(gone)}"


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
        seed: int | None,
        *,
        device: str,
        without: Collection[str] = (),
    ) -> None:
        self.device = device
        self.stand, self.candidates, self.make_slot = stand, candidates, make_slot
        self.budget, self.seed, self.without = budget, seed, frozenset(without)
        self.rng = np.random.default_rng(seed)
        self.threads = Threads()
        self.seeds: list[int] = []
        self.slots: list[Slot] = []
        self._make_slots(1)
        self.contents = Contents(make_slot)
        self._unseen = AUDITED
        self.courses: list[Course] = []
        self.troubles: dict[str, str] = {}
        self.near = {c.name for c in candidates if c.stand is None}
        self.newcomers: dict[str, set[str]] = {c.name: set() for c in candidates}

    def _seed(self, at: int) -> int:
        """A seed: the one at this place, or one of the operating system's that nobody can know."""
        return secrets.randbelow(1 << 31) if self.seed is None else self.seed + at

    def _more_seeds(self, count: int) -> None:
        while len(self.seeds) < count:
            self.seeds.append(self._seed(len(self.seeds)))

    def _make_slots(self, count: int) -> list[Slot]:
        self._more_seeds(count)
        while len(self.slots) < count:
            seed = self.seeds[len(self.slots)]
            self.slots.append(replace(self.make_slot(seed), seed=seed))
        return self.slots[:count]

    def _named_slots(self, count: int) -> list[Slot]:
        """Slots that are only named by their seeds: they are made in another process."""
        self._more_seeds(count)
        return [Slot([], seed=seed) for seed in self.seeds[:count]]

    def _try(self, name: str, step: Callable[[], None]) -> bool:
        """Whether a candidate's step went well; what it raised is kept as its trouble, and the
        threads that it left running are noted."""
        self.threads.absorb()
        try:
            step()
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything
            self.troubles[name] = _trouble(error)
            return False
        finally:
            if name in self.near:  # who came here meanwhile is no far candidate's
                self.newcomers[name] |= self.threads.newcomers()
        return True

    @property
    def running(self) -> list[Course]:
        return [c for c in self.courses if c.candidate.name not in self.troubles]

    def prepare(self) -> None:
        """Bind every candidate to its slots, and run it until its times are steady."""
        for index, candidate in enumerate(self.candidates):
            self._try(candidate.name, partial(self._enter, candidate, index))

    def _enter(self, candidate: Candidate, index: int) -> None:
        near, first = candidate.stand is None, self.slots[0]
        stand = candidate.stand or self.stand
        estimate = stand.estimate(candidate, first)
        sharing = sum(c.stand is None for c in self.candidates[index:]) if near else 1
        each = first.nbytes + sharing * estimate.output_bytes
        fits = max(1, int(0.6 * stand.memory() / max(1, each)))
        footprint = first.nbytes + estimate.output_bytes
        rig, least = self._steady_rig(candidate, estimate.us, footprint, fits)
        self.courses.append(Course(candidate=candidate, rig=rig, least=least))

    def _steady_rig(
        self, candidate: Candidate, estimate: float, footprint: int, fits: int
    ) -> tuple[Entrant, float]:
        """Plan, make the slots that are missing, warm up until two windows agree within 1 %.

        A candidate that was slow only at first gave a wrong estimate: where its samples turn out
        too short, the plan is made again from what they showed. The least time comes along.
        """
        least = estimate
        stand = candidate.stand or self.stand
        make = self._make_slots if candidate.stand is None else self._named_slots
        seconds = self.budget.warmup / len(self.candidates)
        for _ in range(3):
            planned = plan(footprint, stand.cache, estimate, slow_us=stand.slow, fits=fits)
            rig = stand.entrant(candidate, make(planned.calls), self.contents, planned)
            seen: list[float] = []
            until = _now() + int(seconds * 1e9)
            while len(seen) < 2 or (_now() < until and not is_steady(seen, WINDOW)):
                seen.append(rig.sample())
            least = min(least, *seen)
            steady = float(np.median(seen[-WINDOW:]))
            if steady * rig.calls >= SHORTEST or planned.calls >= min(MOST_CALLS, fits):
                break
            estimate = steady
        return rig, least

    def sample(self, readings: Readings, on_round: OnRound | None) -> None:
        """Rounds over all candidates in random order, until each is done or the budget spent.

        Then only those go on that have fewer samples than the least, within reason.
        """
        began, least = _now(), 2 if "samples" in self.without else self.budget.minimum
        for course in self.running:  # the first after another's warm-up is not like the others
            self._try(course.candidate.name, partial(course.take, None))
        for turn in range(self.budget.maximum):
            active = [c for c in self.running if not c.done]
            spent = (_now() - began) / 1e9 / self.budget.seconds
            if spent > 1.0 and turn > 1:
                lacking = [c for c in active if len(c.clean) < least]
                active = [c for c in lacking if spent < PATIENCE or c.may_go_on(self.budget)]
            if not active:
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
            self._try(
                course.candidate.name, partial(course.finish, self.budget.side_samples, self.device)
            )
        crowd = self.threads.crowd()
        for course in self.running:
            if names := sorted(self.newcomers[course.candidate.name]):
                told = f"suspect: threads: {', '.join(names)} outlived a call"
                course.rig.flags.add(told)
            if crowd and course.candidate.name in self.near:
                course.rig.flags.add(f"threads: {crowd} more of the system's than before")

    def audit(self, make_judge: MakeJudge | None) -> None:
        """Time every candidate on contents that nobody has seen, and look at an answer of it."""
        if "fresh" in self.without:
            return
        judged = None if "recheck" in self.without else make_judge
        fresh = Fresh(self.seeds, self.contents, judged, self._unseen_seed, self.device)
        for course in self.running:
            self._try(course.candidate.name, partial(course.audit, fresh, self.device))

    def _unseen_seed(self) -> int:
        self._unseen += 1
        return self._seed(self._unseen)

    def recheck(self, make_judge: MakeJudge) -> None:
        """Refill the slots and compare every candidate's timed path and plain calls, in turns."""
        if not self.running or "recheck" in self.without:
            return
        used = max(c.rig.calls for c in self.running)
        fresh = [self._seed(RECHECKED + i) for i in range(CONTENTS)]
        backward = self.slots[0].grad is not None
        recheck = Recheck(self.seeds[:used], self.contents, make_judge, fresh, backward)
        due = {c.candidate.name: turns(c.rig.calls, c.rig.near) for c in self.running}
        for turn in range(max(due.values())):
            recheck.load(turn)
            for course in self.running:
                tired = turn > 1 and course.rechecking > self.budget.recheck * 1e9
                if turn < due[course.candidate.name] and not (course.refusal or tired):
                    self._try(course.candidate.name, partial(course.answer_to, recheck))

    def outcomes(self) -> dict[str, Outcome]:
        """One outcome a candidate, in the order they were given."""
        for course in self.running if "replaced" not in self.without else ():
            self._try(course.candidate.name, course.own_up)
        found = {name: Outcome(trouble=trouble) for name, trouble in self.troubles.items()}
        for course in self.running:
            stand = course.candidate.stand or self.stand
            found[course.candidate.name] = _outcome(course, stand, self.budget, self.without)
        return {c.name: found[c.name] for c in self.candidates}


def _trouble(error: Exception) -> str:
    if isinstance(error, CellDied):
        return f"its process {error.reason}"
    if isinstance(error, GuestError):
        return "out of memory" if "OutOfMemoryError" in str(error) else f"raised {error}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory"
    text = str(error).strip().splitlines()
    said = text[0] if text else ""
    return said if isinstance(error, CannotTime) else f"raised {type(error).__name__}: {said}"


def _outcome(course: Course, stand: Stand, budget: Budget, without: Collection[str]) -> Outcome:
    if course.refusal:
        return Outcome(refusal=course.refusal)
    samples = course.clean or course.throttled
    found = summarise(samples)
    flags = {f for f in course.rig.flags if check_of(f) not in without}
    if found.width >= budget.width or found.n < budget.minimum:
        flags.add("noisy")
    if "samples" not in without and course.dawdled(budget):
        flags.add(f"suspect: too few samples: {found.n} of {budget.minimum}; it has been quicker")
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
    if course.fresh is not None:
        clocks["fresh"] = round(course.fresh, 3)
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
