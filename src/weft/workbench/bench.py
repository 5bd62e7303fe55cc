"""bench: check, then time only what passed, and make records of it, case by case.

Nothing that has not passed at a case is timed there; what cannot run is a record with its reason.
"""

from __future__ import annotations

import gc
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from weft import machine
from weft.backends import support
from weft.core import (
    BACKWARD,
    FORWARD,
    Ceilings,
    Implementation,
    Operator,
    Record,
    Verdict,
)
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench.bind import bind
from weft.workbench.cell import CellDied, GuestError
from weft.workbench.check import check
from weft.workbench.clock import measure
from weft.workbench.guests import restart, without_their_baseline
from weft.workbench.hands import Guest, here
from weft.workbench.judge import judge
from weft.workbench.limits import ceilings as measured_ceilings
from weft.workbench.oracle import Oracle, fresh_seeds
from weft.workbench.plan import Budget, Candidate, Outcome
from weft.workbench.points import Point, select
from weft.workbench.ran import look
from weft.workbench.recording import Found, make_record
from weft.workbench.remote_clock import RemoteStand, first_call, named
from weft.workbench.slots import Form, Leading, Slot, deal

CHECK_SEEDS = 2

_now = time.perf_counter_ns
Say = Callable[[str], None]


def _silent(line: str) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class _How:
    """What is the same at every point of a run. ``guests`` holds a stranger's process by the name
    of its implementation, ``without`` the checks that are left out."""

    budget: Budget
    seed: int
    say: Say
    guests: Mapping[str, Guest]
    without: Collection[str]


def run(*arguments: Any, **more: Any) -> Iterator[Record]:
    """The records of :func:`run_points` one by one; the same arguments, and the same errors."""
    return chain.from_iterable(run_points(*arguments, **more))


def run_points(
    operators: Sequence[str | Operator] | None = None,
    impls: Sequence[str | Implementation] | None = None,
    cases: Sequence[str] | None = None,
    directions: Sequence[str] | None = None,
    device: str | None = None,
    *,
    all_cases: bool = False,
    quick: bool = False,
    budget: Budget | None = None,
    ceilings: Ceilings | None = None,
    patience: float | None = None,
    seed: int = 0,
    on_event: Say = _silent,
    guests: Mapping[str, Guest] | None = None,
    baselines: Mapping[str, Implementation] | None = None,
    without: Collection[str] = (),
) -> Iterator[list[Record]]:
    """Records of these operators, a list for each point as soon as it is done.

    By default every operator's first bench case of the device, in every direction; ``all_cases``
    takes all of them, ``cases`` names some. ``operators`` and ``impls`` may be objects as well as
    names, for what is not in the registry. With ``patience`` (seconds) forward comes first, and a
    backward that would begin later is left out and said to be. ``on_event`` gets a line of progress
    at a time. ``guests`` are the processes of strangers' implementations, by their names: those are
    checked and timed there, started anew for each point, on seeds from the operating system.
    ``baselines`` set the tolerance of operators that are not in the registry. ``without`` names
    checks to leave out, of the check and of the clock.
    Raises :class:`WeftError` for a name that is not there, before anything runs.
    """
    device = device or machine.default_device()
    chosen = select(operators, impls, cases, directions, device, all_cases, baselines)
    points = [without_their_baseline(p, guests or {}, baselines or {}) for p in chosen]
    budget = budget or Budget.of(device, quick)
    if ceilings is None:
        ceilings = measured_ceilings(device, progress=on_event)
    machine_now = machine.fingerprint(device) | {"ceilings": asdict(ceilings) if ceilings else None}
    if patience is not None:
        points.sort(key=lambda p: p.direction == BACKWARD)
    how = _How(budget=budget, seed=seed, say=on_event, guests=guests or {}, without=without)
    return _run(points, how, ceilings, machine_now, patience)


def _run(
    points: Sequence[Point],
    how: _How,
    ceilings: Ceilings | None,
    fingerprint: Mapping[str, Any],
    patience: float | None,
) -> Iterator[list[Record]]:
    began = _now()
    for number, point in enumerate(points, 1):
        late = patience is not None and _now() - began > patience * 1e9
        if late and point.direction == BACKWARD:
            left = ", ".join(p.operator.name for p in points[number - 1 :])
            how.say(f"left out to stay quick: backward of {left}; weft bench --direction backward")
            return
        progress = partial(_prefixed, how.say, f"[{number}/{len(points)}] {point.title}: ")
        found = _point(point, replace(how, say=progress), number > 1)
        yield [
            make_record(point, i, found[i.name], ceilings, fingerprint)
            for i in point.implementations
        ]
        del found
        free_memory(point.device)


def _prefixed(say: Say, prefix: str, line: str) -> None:
    say(prefix + line)


def _point(point: Point, how: _How, anew: bool) -> dict[str, Found]:
    """Check every implementation at a point, then time those that passed, side by side."""
    found: dict[str, Found] = {}
    passed: list[Implementation] = []
    broken = restart(point, how.guests) if anew else {}
    # One float64 reference for all of them, on seeds that no implementation can know.
    seeds = fresh_seeds(CHECK_SEEDS)
    oracle = Oracle(
        point.operator, point.case, point.direction, point.device, seeds, point.baseline
    )
    for implementation in point.implementations:
        name = implementation.name
        try:
            if name in broken:
                raise CellDied(broken[name])
            answer = support(implementation, point.case, point.device, point.direction)
        except (CellDied, GuestError) as error:
            found[name] = Found(verdict=_verdict(point, implementation, FAIL, f"channel: {error}"))
            continue
        if not (answer.ok and answer.timed):
            verdict = _verdict(point, implementation, UNSUPPORTED, answer.reason)
            found[name] = Found(verdict=verdict)
            continue
        how.say(f"checking {name}")
        found[name] = one = _checked(point, implementation, oracle, how)
        if one.verdict.status == PASS:
            passed.append(implementation)
    if passed:
        grad = _grad_form(oracle)
        del oracle
        how.say(f"timing {', '.join(i.name for i in passed)}")
        for name, outcome in _timed(point, passed, grad, found, how).items():
            _take(found[name], outcome)
        _look(point, passed, grad, found, how)
    return found


def _look(
    point: Point,
    passed: Sequence[Implementation],
    grad: Form | None,
    found: Mapping[str, Found],
    how: _How,
) -> None:
    """Name the kernels that ran, in a pass of its own, after all the timing."""
    free_memory(point.device)
    for one in passed:
        if found[one.name].timing is not None and "provenance" not in how.without:
            ran = look(point, one, grad, how.guests.get(one.name))
            found[one.name].kernels = ran.kernels
            found[one.name].flags |= ran.flags


def _grad_form(oracle: Oracle) -> Form | None:
    """The form of the gradient that a backward is given; None in the forward."""
    if oracle.direction != BACKWARD:
        return None
    form = oracle.grad_form
    return form.shape, form.dtype


def _take(one: Found, outcome: Outcome) -> None:
    one.timing = outcome.timing
    if outcome.refusal:
        one.verdict = replace(one.verdict, status=FAIL, reason=outcome.refusal)
    if outcome.trouble:
        one.flags.add(f"not timed: {outcome.trouble}")


def _verdict(point: Point, implementation: Implementation, status: str, reason: str) -> Verdict:
    return Verdict(
        operator=point.operator.name,
        implementation=implementation.name,
        case=point.case.name,
        direction=point.direction,
        status=status,
        reason=reason,
    )


def _checked(point: Point, implementation: Implementation, oracle: Oracle, how: _How) -> Found:
    """The very first call, timed, and then the check. A first call that raises is left to the
    check to judge."""
    first = None
    guest = how.guests.get(implementation.name)
    try:
        grad = _grad_form(oracle)
        if guest is None:
            first = _first_call(point, implementation, grad, how.seed)
        else:
            first = first_call(guest.cell, _named(point, implementation, grad), _seed())
    except Exception:  # noqa: BLE001 - the check makes the same call and says what it raised
        free_memory(point.device)
    verdict = check(
        point.operator,
        implementation,
        point.case,
        point.direction,
        point.device,
        oracle=oracle,
        without=how.without,
        hands=here if guest is None else guest.hands,
    )
    return Found(verdict=verdict, first=first)


def _seed() -> int:
    """A seed that a stranger cannot know."""
    return secrets.randbelow(1 << 31)


def _named(point: Point, implementation: Implementation, grad: Form | None) -> dict[str, Any]:
    names = (point.operator.name, implementation.name, point.case.name)
    return named(*names, point.direction, point.device, grad)


def _first_call(
    point: Point, implementation: Implementation, grad: Form | None, seed: int
) -> float:
    """Wall time (us) of binding and calling for the first time, compilation included."""
    slot = deal(point.case, point.device, grad, seed)
    synchronise(point.device)
    start = _now()
    _bind(point, implementation, slot)()
    synchronise(point.device)
    return (_now() - start) / 1000


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _bind(point: Point, implementation: Implementation, slot: Slot) -> Callable[[], Any]:
    call = bind(point.operator, implementation, point.case, point.direction, slot.inputs, slot.grad)
    if implementation.outputs is None or point.direction != FORWARD:
        return call
    return lambda: Leading(call())


def _timed(
    point: Point,
    passed: Sequence[Implementation],
    grad: Form | None,
    found: Mapping[str, Found],
    how: _How,
) -> dict[str, Outcome]:
    def on_round(number: int, medians: Mapping[str, float]) -> None:
        best = min(medians, key=medians.__getitem__, default="")
        if best:
            how.say(f"round {number + 1}, fastest so far {best} at {medians[best]:.1f} us")

    free_memory(point.device)
    make_judge = partial(
        judge, point.operator, point.case, point.direction, point.device, point.baseline
    )
    lost: dict[str, Outcome] = {}
    candidates = []
    for one in passed:
        try:
            candidates.append(_candidate(point, one, grad, found[one.name].first, how))
        except (CellDied, GuestError) as error:
            lost[one.name] = Outcome(trouble=f"its process: {error}")
    strange = any(c.stand is not None for c in candidates)
    try:
        return lost | measure(
            candidates,
            partial(deal, point.case, point.device, grad),
            device=point.device,
            budget=how.budget,
            make_judge=make_judge,
            seed=None if strange else how.seed,
            on_round=on_round,
            without=how.without,
        )
    except (torch.OutOfMemoryError, MemoryError):
        free_memory(point.device)
        return {i.name: Outcome(trouble="out of memory") for i in passed}


def _candidate(
    point: Point, one: Implementation, grad: Form | None, first: float | None, how: _How
) -> Candidate:
    guest = how.guests.get(one.name)
    stand = None
    if guest is not None:
        stand = RemoteStand(guest.cell, _named(point, one, grad), point.device, how.without)
    return Candidate(name=one.name, bind=partial(_bind, point, one), first=first, stand=stand)


def free_memory(device: str) -> None:
    """Give back what the last case held, so that the next one finds the device empty."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def went_against(records: Sequence[Record]) -> bool:
    """Whether a verdict went against somebody: a fail, a suspect time, or a pass with no time."""
    return any(
        r.verdict.status == FAIL
        or (r.verdict.status == PASS and r.timing is None)
        or any(f.startswith("suspect") for f in r.flags)
        for r in records
    )


__all__ = ["Budget", "Found", "Point", "make_record", "run", "run_points", "select", "went_against"]
