"""Judge one mutant as an external candidate is judged: by the check, its kernels and its timing.

The check runs over every check and edge case of the mutant's operator in both directions. Observing
kernels and timing are for mutants that only these can catch.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from weft import backends
from weft.core import FORWARD, Case, Ceilings, Implementation, Operator, Record, registry
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench.bench import free_memory, run
from weft.workbench.calls.call import CallerFactory, make_local_caller
from weft.workbench.calls.case_kinds import KINDS, kinds
from weft.workbench.calls.errors import SandboxDied, WorkerError
from weft.workbench.calls.memory import GIB, MemoryBudget, check_bytes, free_bytes, is_shortage
from weft.workbench.calls.seeds import fresh_seeds
from weft.workbench.check.check import ACROSS, check
from weft.workbench.check.oracle import Oracle
from weft.workbench.check.rules import RULES
from weft.workbench.records import BEATS_FLOOR, busy_reason
from weft.workbench.sandbox.caller import WorkerProcess
from weft.workbench.sandbox.observed_kernels import observe_in_worker
from weft.workbench.sandbox.process import Limits, Sandbox
from weft.workbench.selftest import mutants
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.sources.source import Source, load
from weft.workbench.timing.plan import CHECKS, Budget, is_by_time_alone, timing_check_of

N_SEEDS = 3  # for each case; `weft check` uses five
HUGE_ROW = "H1"  # the controls that are checked at cases of over 2^31 elements, one for each operator
LIMITS = Limits(seconds=120.0, memory_bytes=6 << 30)
KILLED, SURVIVED, NOT_RUN = "killed", "survived", "not run"
# Status of a mutant that only its time can show, judged on a busy machine: no time can be trusted there.
INCONCLUSIVE = "inconclusive"
TIME_CHECKS = {"fresh", "clocks", "floor"}  # checks that compare times
# Checks of the suspicions in a record that are not the timing's, by the beginning of the flag. The reasons of
# `provenance` begin with the declared backend.
SUSPICIONS = {
    "suspect: kernels: declared": "provenance",
    "suspect: kernels: ": "observed",
    BEATS_FLOOR["cuda"]: "floor",
}
BUSY = "timing could not be trusted"
# Memory of a GPU: expected bytes of a check from which it waits for its share, the share of what is free at
# the start that all checks may take together, and what each job takes besides (contexts, small cases).
LARGE_BYTES, MEMORY_SHARE, JOB_BYTES = 1 << 30, 0.9, 3 << 29
# Output that a judge would accept if it read verdicts from the candidate's output.
FORGED_VERDICTS = ('"correct": true', '"status": "pass"')
# Without ceilings: the floor shows whether a time is possible, not whether it was measured honestly.
NO_CEILINGS = Ceilings(device="none", copy=1e30, read=1e30, fill=1e30, matrix={}, measured="never")
BUDGET = {
    "cpu": Budget(seconds=2.0, warmup=0.05, min_samples=6, max_rounds=6, side_samples=3, recheck_seconds=0.5),
    "cuda": Budget(seconds=1.5, warmup=0.2, side_samples=5),
}
# Cases to time: large enough for a clock, small enough for a selftest.
TIMED_CASES = {
    "cpu": {
        "softmax": "fp32-2x70000",
        "gelu": "fp32-1024x1024",
        "sum": "fp32-1048576",
        "matmul": "fp32-1024x1024x1024",
    },
    "cuda": {
        "softmax": "bf16-32768x1024",
        "gelu": "bf16-1024x3072",
        "sum": "fp32-2^20",
        "matmul": "bf16-256x256x256",
    },
}


@dataclass(frozen=True, kw_only=True)
class MutantResult:
    """Result of judging one mutant: ``check`` is the check that killed it, ``reason`` its message.

    A mutant with a ``shortage`` was not judged at all cases; it is judged again when no other job runs.
    """

    id: str
    status: str = SURVIVED
    check: str = ""
    reason: str = ""
    case: str = ""
    seconds: float = 0.0
    shortage: str = ""  # memory that was missing at a case, on a GPU

    def killed(self, check_name: str, reason: str, case: str = "") -> MutantResult:
        return replace(self, status=KILLED, check=check_name, reason=reason, case=case)


class OracleCache:
    """Oracles of a selftest: each is computed once and shared by all mutants at its case."""

    def __init__(self, device: str, n_seeds: int = N_SEEDS) -> None:
        self.device, self.n_seeds = device, n_seeds
        self._oracles: dict[tuple[str, str, str], Oracle] = {}
        self._locks: dict[tuple[str, str, str], threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, operator: Operator, case: Case, direction: str, baseline: Implementation | None) -> Oracle:
        key = (operator.name, case.name, direction)
        if "huge" in kinds(case, operator):  # not cached: each is as large as all others together
            return Oracle(operator, case, direction, self.device, fresh_seeds(self.n_seeds), baseline)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # of this key only: other cases are computed at the same time
            if key not in self._oracles:
                seeds = fresh_seeds(self.n_seeds)
                oracle = Oracle(operator, case, direction, self.device, seeds, baseline)
                # The bounds are computed at their first use: here, so that two mutants do not do it twice.
                _ = oracle.bounds
                self._oracles[key] = oracle
            return self._oracles[key]


@dataclass(frozen=True, kw_only=True)
class SelftestSettings:
    """Device of a selftest, the checks and kinds of cases to leave out, and the shared oracles."""

    device: str
    without: frozenset[str]
    oracles: OracleCache
    memory: MemoryBudget = field(default_factory=MemoryBudget)
    problem_lock: threading.Lock = field(default_factory=threading.Lock)

    @staticmethod
    def create(device: str, without: Collection[str] = (), jobs: int = 1) -> SelftestSettings:
        """Return the settings of a selftest of ``jobs`` mutants at once, which share the free memory."""
        oracles = OracleCache(device, 1 if "seeds" in without else N_SEEDS)
        memory = MemoryBudget()
        if device != "cpu":
            memory = MemoryBudget(int(MEMORY_SHARE * free_bytes(device)) - jobs * JOB_BYTES)
        return SelftestSettings(device=device, without=frozenset(without), oracles=oracles, memory=memory)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A mutant with its source and its operator, from the registry or from the mutant's own file."""

    mutant: Mutant
    operator: Operator
    source: Source
    baseline: Implementation | None = None

    @staticmethod
    def of(mutant: Mutant) -> Subject:
        if mutant.operator in registry.operator_names():
            source = Source(kind="mutant", path=mutant.id)
            return Subject(mutant=mutant, operator=registry.operator(mutant.operator), source=source)
        # A mutant of an operator that Weft does not have is judged like a user's file with its own.
        file = inspect.getsourcefile(mutant.make().forward)
        source = Source(kind="file", path=str(file))
        loaded = load(source)
        (operator,) = (o for o in loaded.operators if o.name == mutant.operator)
        baseline = loaded.implementation(operator.name, operator.tolerance.baseline)
        return Subject(mutant=mutant, operator=operator, source=source, baseline=baseline)

    def implementation(self, worker: WorkerProcess) -> Implementation:
        """Return the worker's implementation that is this mutant."""
        name = self.mutant.make().name if self.source.kind == "file" else self.mutant.id
        declared = [i for i in worker.implementations if i.operator == self.operator.name]
        return next(i for i in declared if i.name == name)


def why_not_run(mutant: Mutant, device: str) -> str:
    """Return why a mutant cannot run here, '' if it can."""
    if device not in mutant.devices:
        return mutant.not_here
    support = backends.backend_support(mutant.backend, device)
    return "" if support else support.reason


def cases_of(subject: Subject, device: str, without: Collection[str]) -> Iterator[Case]:
    """Return the check and edge cases, quick and plain ones first.

    A mutant that fails at a plain case fails by the check that is meant for it, and not by special
    values that reveal any fault. One control of each operator has its huge cases, which take a minute.
    """
    operator, left_out = subject.operator, frozenset(without) & set(KINDS)
    if subject.mutant.honest and subject.mutant.row != HUGE_ROW:
        left_out |= {"huge"}
    cases = [*operator.select("check", device), *operator.select("edge", device)]
    cases = [c for c in cases if not kinds(c, operator) & left_out]
    plain = {c.name for c in cases if kinds(c, operator) <= {"sizes"}}

    def order(case: Case) -> tuple[int, bool, int]:
        group, size = _size_order(case)
        return group, case.name not in plain, size

    return iter(sorted(cases, key=order))


def _size_order(case: Case) -> tuple[int, int]:
    # Medium sizes first: tiny cases miss faults, large ones take long.
    size = max(i.numel for i in case.inputs)
    return (0 if 100 <= size <= 5000 else 1 if size < 100 else 2), size


def timed_case(operator: Operator, device: str) -> Case:
    name = TIMED_CASES[device].get(operator.name)
    return operator.case(name) if name else operator.select("bench", device)[0]


def run_step(name: str, subject: Subject, settings: SelftestSettings) -> MutantResult:
    """Run one of STEPS; a worker that ends outside of a call kills the mutant by ``channel``.

    Nothing else may run beside ``clock``.
    """
    start = time.monotonic()
    result = MutantResult(id=subject.mutant.id)
    try:
        result = STEPS[name](subject, settings, result)
    except (SandboxDied, WorkerError) as error:
        result = result.killed("channel", str(error))
        if settings.device != "cpu" and is_shortage(str(error)):
            result = _short_of_memory(result.id, settings, str(error))
    except torch.OutOfMemoryError as error:  # of the reference or the baseline, in this process
        result = _short_of_memory(result.id, settings, str(error))
    return replace(result, seconds=time.monotonic() - start)


def _short_of_memory(mutant_id: str, settings: SelftestSettings, message: str) -> MutantResult:
    free_memory(settings.device)
    free = free_bytes(settings.device) / GIB
    shortage = f"out of memory: {free:.3g} GiB free; run with fewer --jobs; {' '.join(message.split())[:200]}"
    return MutantResult(id=mutant_id, status=NOT_RUN, reason=shortage, shortage=shortage)


def _check_step(subject: Subject, settings: SelftestSettings, result: MutantResult) -> MutantResult:
    with WorkerProcess(subject.source, LIMITS) as worker:
        implementation = subject.implementation(worker)
        return _check_all_cases(subject, implementation, worker.make_caller, settings, result, worker)


def _check_all_cases(
    subject: Subject,
    implementation: Implementation,
    make_caller: CallerFactory,
    settings: SelftestSettings,
    result: MutantResult,
    worker: WorkerProcess | None = None,
) -> MutantResult:
    """Check all cases in both directions until one fails; give a reason if none could be checked."""
    operator, reasons, n_passed, shortage = subject.operator, [], 0, ""
    for case in cases_of(subject, settings.device, settings.without):
        for direction in operator.directions:
            if direction != FORWARD and "backward" in settings.without:
                continue
            support = backends.support(implementation, case, settings.device, direction)
            if not support:
                reasons.append(support.reason)
                continue
            point = (operator, implementation, case, direction, settings.device)
            with _memory_for(settings, operator, case, direction):
                # C15 searches its callers' variables for `oracle`: keep this name.
                oracle = settings.oracles.get(operator, case, direction, subject.baseline)
                verdict = check(*point, oracle=oracle, without=settings.without, make_caller=make_caller)
                # A huge oracle is not cached: without this name the context can free its memory.
                del oracle
            if verdict.status == UNSUPPORTED:
                reasons.append(verdict.reason)
                if is_shortage(verdict.reason):
                    shortage = shortage or f"{verdict.reason} ({case.name} {direction})"
            elif verdict.status == FAIL:
                rule = next((f.check for f in verdict.findings if f.status == FAIL), "oracle")
                if rule == "channel" and "channel" in settings.without and worker is not None:
                    # Without the private channel, printed verdicts are believed.
                    believed = any(text in worker.sandbox.output for text in FORGED_VERDICTS)
                    return result if believed else result.killed(rule, verdict.reason)
                return result.killed(rule, verdict.reason, f"{case.name} {direction}")
            n_passed += verdict.status == PASS
    # The case that was not judged may be the one that kills a mutant.
    if shortage and not (n_passed and subject.mutant.honest):
        return replace(result, status=NOT_RUN, reason=shortage, shortage=shortage)
    if not n_passed:
        return replace(result, status=NOT_RUN, reason=reasons[0] if reasons else "no case is left")
    return replace(result, shortage=shortage)


@contextmanager
def _memory_for(settings: SelftestSettings, operator: Operator, case: Case, direction: str) -> Iterator[None]:
    """Wait until the memory of a large case is free of other jobs' cases; free it afterwards."""
    nbytes = check_bytes(operator, case, direction)
    if settings.device == "cpu" or nbytes < LARGE_BYTES:
        yield
        return
    with settings.memory.reserve(nbytes):
        yield
        free_memory(settings.device)


def _kernels_step(subject: Subject, settings: SelftestSettings, result: MutantResult) -> MutantResult:
    """Check that the observed kernels are the backend's, with a profiler and without."""
    if {"provenance", "observed"} <= settings.without:
        return result
    # This worker only lists the declarations; the observation starts one of its own.
    with WorkerProcess(subject.source, LIMITS) as worker:
        implementation = subject.implementation(worker)
        case = _small_case(subject.operator, implementation, settings.device)
    if case is None:
        return result
    observed = observe_in_worker(subject.source, implementation, case, settings.device)
    for check_name, why in observed.violations.items():
        if check_name not in settings.without:
            return result.killed(check_name, why, case.name)
    return result


def _small_case(operator: Operator, implementation: Implementation, device: str) -> Case | None:
    for case in sorted(operator.select("check", device), key=_size_order):
        if backends.support(implementation, case, device, FORWARD):
            return case
    return None


def _clock_step(subject: Subject, settings: SelftestSettings, result: MutantResult) -> MutantResult:
    with WorkerProcess(subject.source, LIMITS) as worker:
        implementation = subject.implementation(worker)
        return _time(subject, implementation, {implementation.name: worker}, settings, result)


def _time(
    subject: Subject,
    implementation: Implementation,
    workers: Mapping[str, WorkerProcess],
    settings: SelftestSettings,
    result: MutantResult,
) -> MutantResult:
    operator = subject.operator
    case = timed_case(operator, settings.device)
    (record,) = run(
        [operator],
        [implementation],
        [case.name],
        [FORWARD],
        settings.device,
        budget=BUDGET[settings.device],
        ceilings=NO_CEILINGS,
        workers=workers,
        baselines={operator.name: subject.baseline} if subject.baseline else {},
        # Kinds of cases and parts of judging are no names that a bench can leave out.
        without=settings.without & {*CHECKS, *RULES, *ACROSS},
    )
    busy = busy_reason([record])
    for check_name, reason in record_violations(record):
        # A busy machine excuses a doubtful time, but no wrong output.
        if busy and subject.mutant.honest and is_by_time_alone(reason):
            return _inconclusive(result, case, busy)
        # A check that is left out may still report: `without` must show what survives without it.
        if check_name not in settings.without:
            return result.killed(check_name, reason, case.name)
    if busy and not subject.mutant.honest and set(subject.mutant.killed_by) <= TIME_CHECKS:
        return _inconclusive(result, case, busy)
    return result


def _inconclusive(result: MutantResult, case: Case, busy: str) -> MutantResult:
    reason = f"{BUSY}: the machine was busy ({busy}): times are doubtful"
    return replace(result, status=INCONCLUSIVE, reason=reason, case=case.name)


def record_violations(record: Record) -> Iterator[tuple[str, str]]:
    """Yield the failures and suspicions of a record: the check and its message."""
    verdict = record.verdict
    if verdict.status == FAIL:
        rule = next((f.check for f in verdict.findings if f.status == FAIL), "")
        # A refusal by the timing has no failed rule; its message names the check.
        yield rule or timing_check_of(verdict.reason) or verdict.reason.partition(":")[0], verdict.reason
    for flag in record.flags:
        if flag.startswith("suspect"):
            yield check_of_suspicion(flag), flag
        elif flag.startswith("not timed"):
            yield "timed", flag


def check_of_suspicion(flag: str) -> str:
    """Return the name of the check that made a suspicion.

    Raises ValueError for one that no check is known to make: another name would hide what caught a mutant.

    >>> check_of_suspicion("suspect: kernels: only without one: aten::gelu")
    'observed'
    """
    others = (check for prefix, check in SUSPICIONS.items() if flag.startswith(prefix))
    check_name = timing_check_of(flag) or next(others, "")
    if not check_name:
        raise ValueError(f"no check is known to make this suspicion: {flag}")
    return check_name


# Steps of judging a candidate. Each step starts a worker process of its own.
STEPS: dict[str, Callable[[Subject, SelftestSettings, MutantResult], MutantResult]] = {
    "check": _check_step,
    "kernels": _kernels_step,
    "clock": _clock_step,
}


def judge_in_one_process(mutant: Mutant, settings: SelftestSettings) -> MutantResult:
    """Judge with judge and candidate in one process (``--without process``).

    Both run in a sandbox, so that the candidate cannot harm this process.
    """
    argument = {"without": sorted(settings.without), "device": settings.device}
    entry = "weft.workbench.selftest.judge:handlers"
    try:
        with Sandbox(entry, limits=replace(LIMITS, seconds=600.0), argument=argument) as sandbox:
            return MutantResult(**sandbox.request("judge", {"id": mutant.id}).payload)
    except (SandboxDied, WorkerError) as error:
        return MutantResult(id=mutant.id).killed("channel", str(error))


def handlers(argument: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the handler of a sandbox in which judge and candidate share one process."""
    # The candidate shares this process with the oracle: mutants that search for it survive only here.
    settings = SelftestSettings.create(argument["device"], argument["without"])

    def judge(payload: Mapping[str, Any], tensors: Sequence[Any]) -> tuple[dict[str, Any], tuple[()]]:
        subject = Subject.of(mutants.find(payload["id"]))
        implementation, result = subject.mutant.make(), MutantResult(id=payload["id"])
        result = _check_all_cases(subject, implementation, make_local_caller, settings, result)
        # No kernels step: it starts a worker process, and this mode is about having none.
        if result.status == SURVIVED and subject.mutant.phase == "bench":
            result = _time(subject, implementation, {}, settings, result)
        return asdict(result), ()

    return {"judge": judge}
