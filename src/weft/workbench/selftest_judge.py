"""One mutant judged as a stranger's kernel is, in its own process: by check, kernels and clock.

The check goes over every check and edge case of its operator in both directions. A profiler and
the clock are for those that it takes one to catch.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from weft import backends
from weft.core import FORWARD, Case, Ceilings, Implementation, Operator, Record, registry
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench import bring, mutants
from weft.workbench.bench import free_memory
from weft.workbench.bring import Source
from weft.workbench.cell import Cell, CellDied, GuestError, Limits
from weft.workbench.check import check as check_one
from weft.workbench.hands import Guest, Hands, here
from weft.workbench.kinds import KINDS, kinds
from weft.workbench.mutants.mutant import Mutant
from weft.workbench.oracle import Oracle, fresh_seeds
from weft.workbench.plan import CHECKS, Budget, check_of
from weft.workbench.ran import of_stranger

SEEDS = 3  # a case; `weft check` takes five
LIMITS = Limits(seconds=120.0, memory_bytes=6 << 30)
KILLED, SURVIVED, NOT_RUN = "killed", "survived", "not run"
FORGED = (
    '"correct": true',
    '"status": "pass"',
)  # what a judge would read who reads what is printed
# No ceiling: whether a time is possible at all is another question than whether it is true.
NO_CEILINGS = Ceilings(device="none", copy=1e30, read=1e30, fill=1e30, matrix={}, measured="never")
BUDGET = {
    "cpu": Budget(seconds=2.0, warmup=0.05, minimum=6, maximum=6, side_samples=3, recheck=0.5),
    "cuda": Budget(seconds=1.5, warmup=0.2, side_samples=5),
}
# Where a clock looks: large enough for a clock, small enough for a selftest.
TIMED = {
    "cpu": {
        "softmax": "fp32-2x70000",
        "gelu": "fp32-1024x1024",
        "sum": "fp32-1048576",
        "matmul": "bf16-512x512x512",
    },
    "cuda": {
        "softmax": "bf16-32768x1024",
        "gelu": "bf16-1024x3072",
        "sum": "fp32-2^20",
        "matmul": "bf16-256x256x256",
    },
}


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What became of one mutant: ``check`` is what killed it, ``reason`` how it was put."""

    id: str
    status: str = SURVIVED
    check: str = ""
    reason: str = ""
    case: str = ""
    seconds: float = 0.0

    def killed(self, by: str, reason: str, case: str = "") -> Judged:
        return replace(self, status=KILLED, check=by, reason=reason, case=case)


class Oracles:
    """The oracles of a selftest, each made once and shared by all who are judged at its case."""

    def __init__(self, device: str, n_seeds: int = SEEDS) -> None:
        self.device, self.n_seeds = device, n_seeds
        self._made: dict[tuple[str, str, str], Oracle] = {}
        self._locks: dict[tuple[str, str, str], threading.Lock] = {}
        self._lock = threading.Lock()

    def at(
        self, operator: Operator, case: Case, direction: str, baseline: Implementation | None
    ) -> Oracle:
        key = (operator.name, case.name, direction)
        if "huge" in kinds(case, operator):  # kept by nobody: each is as large as all others
            return Oracle(
                operator, case, direction, self.device, fresh_seeds(self.n_seeds), baseline
            )
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._made:
                seeds = fresh_seeds(self.n_seeds)
                made = Oracle(operator, case, direction, self.device, seeds, baseline)
                _ = made.bounds
                self._made[key] = made
            return self._made[key]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where mutants are judged: the device, what is left out, and the oracles that are shared."""

    device: str
    without: frozenset[str]
    oracles: Oracles
    alone: threading.Lock = field(default_factory=threading.Lock)  # for what takes all the memory

    @staticmethod
    def of(device: str, without: Collection[str] = ()) -> Setting:
        seeds = 1 if "seeds" in without else SEEDS
        return Setting(device=device, without=frozenset(without), oracles=Oracles(device, seeds))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A mutant with its operator: the registry's, or the one that its own file declares."""

    mutant: Mutant
    operator: Operator
    source: Source
    baseline: Implementation | None = None

    @staticmethod
    def of(mutant: Mutant) -> Subject:
        if mutant.operator in registry.operator_names():
            source = Source(kind="mutant", path=mutant.id)
            return Subject(
                mutant=mutant, operator=registry.operator(mutant.operator), source=source
            )
        file = inspect.getsourcefile(mutant.make().forward)
        source = Source(kind="file", path=str(file))
        brought = bring.load(source)
        (operator,) = (o for o in brought.operators if o.name == mutant.operator)
        baseline = brought.implementation(operator.name, operator.tolerance.baseline)
        return Subject(mutant=mutant, operator=operator, source=source, baseline=baseline)

    def stands_for(self, guest: Guest) -> Implementation:
        """What the guest declares that is this mutant."""
        name = self.mutant.make().name if self.source.kind == "file" else self.mutant.id
        mine = [i for i in guest.implementations if i.operator == self.operator.name]
        return next(i for i in mine if i.name == name)


def why_not(mutant: Mutant, device: str) -> str:
    """Why a mutant cannot run here, '' where it can."""
    if device not in mutant.devices:
        return mutant.not_here
    support = backends.backend_support(mutant.backend, device)
    return "" if support else support.reason


def cases_of(subject: Subject, device: str, without: Collection[str]) -> Iterator[Case]:
    """The check and edge cases, quick and plain ones first: what falls at a plain case falls by the
    check that is meant for it, and not by some special value that shows everything."""
    operator, left_out = subject.operator, frozenset(without) & set(KINDS)
    found = [*operator.select("check", device), *operator.select("edge", device)]
    found = [c for c in found if not kinds(c, operator) & left_out]
    plain = {c.name for c in found if kinds(c, operator) <= {"sizes"}}

    def order(case: Case) -> tuple[int, bool, int]:
        group, size = _worth(case)
        return group, case.name not in plain, size

    return iter(sorted(found, key=order))


def _worth(case: Case) -> tuple[int, int]:
    size = max(i.numel for i in case.inputs)
    return (0 if 100 <= size <= 5000 else 1 if size < 100 else 2), size


def timed_case(operator: Operator, device: str) -> Case:
    name = TIMED[device].get(operator.name)
    return operator.case(name) if name else operator.select("bench", device)[0]


def step(name: str, subject: Subject, setting: Setting) -> Judged:
    """One of STEPS; where the candidate's process ends outside of a call, that is what killed it.

    Nothing else may run beside ``clock``.
    """
    began = time.monotonic()
    found = Judged(id=subject.mutant.id)
    try:
        found = STEPS[name](subject, setting, found)
    except (CellDied, GuestError) as error:
        found = found.killed("channel", str(error))
    return replace(found, seconds=time.monotonic() - began)


def _checked(subject: Subject, setting: Setting, found: Judged) -> Judged:
    with Guest(subject.source, LIMITS) as guest:
        implementation = subject.stands_for(guest)
        return _verdicts(subject, implementation, guest.hands, setting, found, guest)


def _verdicts(
    subject: Subject,
    implementation: Implementation,
    hands: Hands,
    setting: Setting,
    found: Judged,
    guest: Guest | None = None,
) -> Judged:
    """The first verdict against it, over all cases in both directions; why nothing was checked."""
    operator, reasons, passed = subject.operator, [], 0
    for case in cases_of(subject, setting.device, setting.without):
        for direction in operator.directions:
            if direction != FORWARD and "backward" in setting.without:
                continue
            support = backends.support(implementation, case, setting.device, direction)
            if not support:
                reasons.append(support.reason)
                continue
            place = (operator, implementation, case, direction, setting.device)
            with _room(setting, "huge" in kinds(case, operator)):
                oracle = setting.oracles.at(operator, case, direction, subject.baseline)
                verdict = check_one(*place, oracle=oracle, without=setting.without, hands=hands)
                del oracle
            if verdict.status == UNSUPPORTED:
                reasons.append(verdict.reason)
            elif verdict.status == FAIL:
                by = next((f.check for f in verdict.findings if f.status == FAIL), "oracle")
                if by == "channel" and "channel" in setting.without and guest is not None:
                    return found if _believed(guest.cell) else found.killed(by, verdict.reason)
                return found.killed(by, verdict.reason, f"{case.name} {direction}")
            passed += verdict.status == PASS
    if not passed:
        return replace(found, status=NOT_RUN, reason=reasons[0] if reasons else "no case is left")
    return found


@contextmanager
def _room(setting: Setting, huge: bool) -> Iterator[None]:
    """One huge case at a time, and nothing kept of it."""
    if not huge:
        yield
        return
    with setting.alone:
        yield
        free_memory(setting.device)


def _believed(cell: Cell) -> bool:
    """Whether what a process printed would pass, for a judge who reads that."""
    return any(said in cell.output for said in FORGED)


def _looked_at(subject: Subject, setting: Setting, found: Judged) -> Judged:
    """The kernels that really ran: are they its backend's, and the same when nobody looks?"""
    if {"provenance", "observed"} <= setting.without:
        return found
    with Guest(subject.source, LIMITS) as guest:
        implementation = subject.stands_for(guest)
        case = _small_case(subject.operator, implementation, setting.device)
    if case is None:
        return found
    ran = of_stranger(subject.source, implementation, case, setting.device)
    for by, why in ran.against.items():
        if by not in setting.without:
            return found.killed(by, why, case.name)
    return found


def _small_case(operator: Operator, implementation: Implementation, device: str) -> Case | None:
    for case in sorted(operator.select("check", device), key=_worth):
        if backends.support(implementation, case, device, FORWARD):
            return case
    return None


def _timed(subject: Subject, setting: Setting, found: Judged) -> Judged:
    with Guest(subject.source, LIMITS) as guest:
        implementation = subject.stands_for(guest)
        return _recorded(subject, implementation, {implementation.name: guest}, setting, found)


def _recorded(
    subject: Subject,
    implementation: Implementation,
    guests: Mapping[str, Guest],
    setting: Setting,
    found: Judged,
) -> Judged:
    from weft.workbench.bench import run

    operator = subject.operator
    case = timed_case(operator, setting.device)
    baselines = {operator.name: subject.baseline} if subject.baseline else {}
    (record,) = run(
        [operator],
        [implementation],
        [case.name],
        [FORWARD],
        setting.device,
        budget=BUDGET[setting.device],
        ceilings=NO_CEILINGS,
        guests=guests,
        baselines=baselines,
        without=setting.without & ({*CHECKS} | _rules()),
    )
    for by, reason in against(record):
        if by not in setting.without:
            return found.killed(by, reason, case.name)
    return found


def _rules() -> set[str]:
    from weft.workbench.check import ACROSS
    from weft.workbench.check_rules import RULES

    return {*RULES, *ACROSS}


def against(record: Record) -> Iterator[tuple[str, str]]:
    """What a record says against its candidate: the check, and how it is put."""
    verdict = record.verdict
    if verdict.status == FAIL:
        rule = next((f.check for f in verdict.findings if f.status == FAIL), "")
        by = rule or check_of(verdict.reason) or verdict.reason.partition(":")[0]
        yield by, verdict.reason
    for flag in record.flags:
        if flag.startswith("suspect"):
            yield check_of(flag) or "floor", flag
        elif flag.startswith("not timed"):
            yield "timed", flag


# What a candidate goes through. Each step has a process of its own.
STEPS: dict[str, Callable[[Subject, Setting, Judged], Judged]] = {
    "check": _checked,
    "kernels": _looked_at,
    "clock": _timed,
}


def in_one_process(mutant: Mutant, setting: Setting) -> Judged:
    """Judged with judge and candidate in one process (``--without process``): a cell of their own,
    so that it harms nobody else."""
    argument = {"without": sorted(setting.without), "device": setting.device}
    nothing = Judged(id=mutant.id)
    entry = "weft.workbench.selftest_judge:handlers"
    try:
        with Cell(entry, limits=replace(LIMITS, seconds=600.0), argument=argument) as cell:
            return Judged(**cell.ask("judge", {"id": mutant.id}).payload)
    except (CellDied, GuestError) as error:
        return nothing.killed("channel", str(error))


def handlers(argument: Mapping[str, Any]) -> Mapping[str, Any]:
    """A cell's entry, for a judge who shares a process with the candidate."""
    setting = Setting.of(argument["device"], argument["without"])

    def judge(said: Mapping[str, Any], tensors: Sequence[Any]) -> tuple[dict[str, Any], tuple[()]]:
        subject = Subject.of(mutants.find(said["id"]))
        made, found = subject.mutant.make(), Judged(id=said["id"])
        found = _verdicts(subject, made, here, setting, found)
        if found.status == SURVIVED and subject.mutant.phase == "bench":
            found = _recorded(subject, made, {}, setting, found)
        return asdict(found), ()

    return {"judge": judge}
