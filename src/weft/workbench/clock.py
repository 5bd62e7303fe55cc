"""The clock: candidates of one case timed side by side, round by round, in random order.

What a number means, and what it cannot see, is in docs/timing.md. This file holds what is common
to every device; ``clock_cuda.py`` and ``clock_cpu.py`` know how one sample is taken.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from weft.core import Timing
from weft.machine.clocks import Sampler
from weft.workbench.plan import (
    MOST_CALLS,
    SHORTEST,
    Budget,
    Candidate,
    CannotTime,
    ClockReplaced,
    Outcome,
    Rig,
    Stand,
    plan,
    replaced,
)
from weft.workbench.recheck import MakeJudge, Recheck, turns
from weft.workbench.slots import MakeSlot, Slot, tensors_of
from weft.workbench.statistics import drift, is_steady, summarise

_now = time.perf_counter_ns

RETRIES = 20  # throttled samples of one candidate that are taken again
WINDOW = 5  # samples whose medians must agree before timing begins


@dataclass(kw_only=True)
class _Course:
    """A candidate on its way through the measurement."""

    candidate: Candidate
    rig: Rig
    clean: list[float] = field(default_factory=list)
    throttled: list[float] = field(default_factory=list)
    readings: list[dict[str, Any]] = field(default_factory=list)
    warm: float | None = None
    host: float | None = None
    latest: float = 0.0
    refusal: str = ""
    done: bool = False


def stand_for(device: str) -> Stand:
    """The measuring stand of a device, 'cuda' or 'cpu'."""
    if device == "cuda":
        from weft.workbench.clock_cuda import CudaStand

        return CudaStand()
    from weft.workbench.clock_cpu import CpuStand

    return CpuStand()


def measure(
    candidates: Sequence[Candidate],
    make_slot: MakeSlot,
    *,
    device: str,
    budget: Budget | None = None,
    make_judge: MakeJudge | None = None,
    seed: int = 0,
    on_round: Callable[[int, Mapping[str, float]], None] | None = None,
) -> dict[str, Outcome]:
    """Time candidates side by side at one case and direction; one outcome a name.

    ``make_slot(seed)`` gives one call's inputs; ``make_judge(slot)`` gives what compares an output
    with the oracle at the slot's contents (without it nothing is re-checked, for tests of the
    clock alone). ``on_round(round, medians)`` is called after each round.
    Raises :class:`ClockReplaced` where the clock's functions were replaced before it began.
    """
    if replaced():
        raise ClockReplaced(f"replaced: {', '.join(replaced())}")
    budget = budget or Budget.of(device)
    rng = np.random.default_rng(seed)
    stand = stand_for(device)
    threads = threading.active_count()
    slots = [make_slot(seed)]
    outcomes: dict[str, Outcome] = {}
    courses: list[_Course] = []
    share = budget.warmup / max(1, len(candidates))
    for candidate in candidates:

        def ready(candidate: Candidate = candidate) -> None:
            rig = _prepare(stand, candidate, slots, make_slot, seed, share, len(candidates))
            courses.append(_Course(candidate=candidate, rig=rig))

        _guarded(candidate.name, outcomes, ready)
    _sample_all(courses, outcomes, budget, rng, Sampler(device), on_round)
    for course in courses:
        if course.candidate.name not in outcomes:
            _guarded(course.candidate.name, outcomes, partial(_side_numbers, course, budget))
    if threading.active_count() > threads:
        for course in courses:
            course.rig.flags.add("threads: more Python threads after timing than before")
    live = [c for c in courses if c.candidate.name not in outcomes]
    if make_judge is not None and live:
        _recheck(live, outcomes, slots, make_slot, make_judge, seed)
    gone = replaced()
    for course in courses:
        if gone:
            course.refusal = f"the clock's own functions were replaced: {', '.join(gone)}"
        if course.candidate.name not in outcomes:
            outcomes[course.candidate.name] = _outcome(course, stand, budget)
    return {c.name: outcomes[c.name] for c in candidates}


def _trouble(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory"
    text = str(error).strip().splitlines()
    said = text[0] if text else ""
    return said if isinstance(error, CannotTime) else f"raised {type(error).__name__}: {said}"


def _guarded(name: str, outcomes: dict[str, Outcome], step: Callable[[], None]) -> bool:
    """Run one step of a candidate; what it raises becomes its outcome, and the others go on."""
    try:
        step()
    except Exception as error:  # noqa: BLE001 - a candidate may raise anything
        outcomes[name] = Outcome(trouble=_trouble(error))
        return False
    return True


def _prepare(
    stand: Stand,
    candidate: Candidate,
    slots: list[Slot],
    make_slot: MakeSlot,
    seed: int,
    seconds: float,
    sharers: int,
) -> Rig:
    """Plan, make the slots that are missing, and run until successive windows agree within 1 %.

    A candidate that was slow only at first gave a wrong estimate: where its samples turn out too
    short, the plan is made again from what they showed.
    """
    estimate = stand.estimate(candidate, slots[0])
    output_bytes = sum(t.nbytes for t in tensors_of(candidate.bind(slots[0])()))
    inputs_bytes = slots[0].nbytes
    fits = int(0.6 * stand.memory() / max(1, inputs_bytes + sharers * output_bytes))
    for _ in range(3):
        planned = plan(
            inputs_bytes + output_bytes, stand.cache, estimate, slow_us=stand.slow, fits=fits
        )
        while len(slots) < planned.calls:
            slots.append(make_slot(seed + len(slots)))
        rig = stand.rig(candidate, slots[: planned.calls], planned)
        seen: list[float] = []
        until = _now() + int(seconds * 1e9)
        while len(seen) < 2 or (_now() < until and not is_steady(seen, WINDOW)):
            seen.append(rig.sample())
        steady = float(np.median(seen[-WINDOW:]))
        if steady * rig.calls >= SHORTEST or planned.calls >= min(MOST_CALLS, fits):
            return rig
        estimate = steady
    return rig


def _sample_all(
    courses: list[_Course],
    outcomes: dict[str, Outcome],
    budget: Budget,
    rng: np.random.Generator,
    sampler: Sampler,
    on_round: Callable[[int, Mapping[str, float]], None] | None,
) -> None:
    """Rounds over all candidates in random order, until each is done or the budget is spent."""
    until = _now() + int(budget.seconds * 1e9)
    for course in courses:  # the first round after another's warm-up is not like the others
        course.done = not _guarded(course.candidate.name, outcomes, partial(_one, course))
    for turn in range(budget.maximum):
        active = [c for c in courses if not c.done]
        if not active or (_now() > until and turn > 1):
            break
        for index in rng.permutation(len(active)):
            course = active[index]
            if not _guarded(course.candidate.name, outcomes, partial(_one, course)):
                course.done = True
                continue
            us = course.latest
            reading = sampler.read()
            course.readings.append(reading)
            if is_throttled(reading) and len(course.throttled) < RETRIES:
                course.throttled.append(us)
            else:
                course.clean.append(us)
        for course in (c for c in active if not c.done):
            enough = len(course.clean) >= budget.minimum and turn % 5 == 4
            course.done = enough and summarise(course.clean).width < budget.width
        if on_round is not None:
            on_round(
                turn, {c.candidate.name: float(np.median(c.clean)) for c in courses if c.clean}
            )


def _one(course: _Course) -> None:
    course.latest = course.rig.sample()


def is_throttled(reading: Mapping[str, Any]) -> bool:
    """Whether heat or a brake held the clock down. A power cap is the normal state of a large GPU
    under full load, not a fault of the moment: it is flagged and not retried."""
    held = ("thermal", "slowdown", "brake")
    return any(word in reason for reason in reading.get("throttle", ()) for word in held)


def _side_numbers(course: _Course, budget: Budget) -> None:
    """``warm`` and ``host``, and whether two clocks agree on what was timed."""
    course.warm = float(np.median([course.rig.warm() for _ in range(budget.side_samples)]))
    course.host = float(np.median([course.rig.host() for _ in range(budget.side_samples)]))
    course.rig.flags.update(course.rig.cross_check())


def _recheck(
    courses: list[_Course],
    outcomes: dict[str, Outcome],
    slots: Sequence[Slot],
    make_slot: MakeSlot,
    make_judge: MakeJudge,
    seed: int,
) -> None:
    """Refill the slots and compare every candidate's timed path and plain calls, turn by turn."""
    used = max(c.rig.calls for c in courses)
    recheck = Recheck(slots[:used], make_slot, make_judge, seed)
    for turn in range(max(turns(c.rig.calls) for c in courses)):
        recheck.load(turn)
        for course in courses:
            if course.candidate.name in outcomes or course.refusal:
                continue
            if turn < turns(course.rig.calls):
                _guarded(course.candidate.name, outcomes, partial(_recheck_one, recheck, course))


def _recheck_one(recheck: Recheck, course: _Course) -> None:
    course.refusal = recheck.candidate(course.rig) or ""


def _outcome(course: _Course, stand: Stand, budget: Budget) -> Outcome:
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


def summarise_clocks(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and range of what was read beside the rounds, and how often each throttle reason."""
    found: dict[str, Any] = {}
    for key in ("sm_mhz", "mem_mhz", "power_w", "temp_c"):
        values = [float(r[key]) for r in readings if r.get(key) is not None]
        if values:
            found[key] = [min(values), float(np.median(values)), max(values)]
    reasons = Counter(reason for r in readings for reason in r.get("throttle", ()))
    return found | ({"throttle": dict(reasons), "readings": len(readings)} if readings else {})
