"""Bench: check each implementation, time those that passed, and make records, point by point.

An implementation is never timed at a case where it has not passed. One that cannot run gets a record
with its reason.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
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
    Support,
    Verdict,
    WeftError,
)
from weft.core.log import Log, no_log
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.machine.load import busier
from weft.machine.load import measure as measure_load
from weft.machine.nvtx import annotate
from weft.workbench.calls.bind import bind
from weft.workbench.calls.buffers import InputBuffers, LeadingOutputs, ShapeDtype, allocate_buffers
from weft.workbench.calls.call import make_local_caller
from weft.workbench.calls.errors import SandboxDied, WorkerError
from weft.workbench.calls.part_times import part
from weft.workbench.calls.seeds import fresh_seeds
from weft.workbench.calls.selection import BenchPoint, select_points, with_variants
from weft.workbench.check.by_rows import return_freed_memory
from weft.workbench.check.check import check
from weft.workbench.check.oracle import Oracle
from weft.workbench.check.output_judge import OutputJudges
from weft.workbench.durations import expected_bench_seconds
from weft.workbench.records import BenchResult, is_suspect_by_load, make_record, suspect_flags
from weft.workbench.sandbox.caller import WorkerProcess
from weft.workbench.sandbox.candidates import restart_workers, without_external_baseline
from weft.workbench.sandbox.observed_kernels import ObservedKernels, observe_kernels
from weft.workbench.sandbox.remote_timing import RemoteTimingBackend, describe_point, measure_first_call
from weft.workbench.timing.ceilings import ceilings as measured_ceilings
from weft.workbench.timing.measure import measure
from weft.workbench.timing.plan import Budget, Candidate, Outcome

CHECK_SEEDS = 2  # a bench case is large: each seed costs a float64 reference
# Budget of a point in the default set, whose eight points must take less than a minute together.
FIRST_LOOK_SECONDS = {"cuda": 2.5, "cpu": 0.8}

_now = time.perf_counter_ns


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options that all points of a run share.

    ``workers`` are the worker processes of external implementations by name, ``without`` the checks
    to leave out, ``first_look``, ``verdicts``, ``trusted``, ``judges`` and
    ``observed`` as in :func:`run_points`.
    """

    budget: Budget
    seed: int = 0
    log: Log = no_log
    workers: Mapping[str, WorkerProcess]
    without: Collection[str] = ()
    first_look: bool = False
    verdicts: Mapping[tuple[str, str], Verdict] = field(default_factory=dict)
    trusted: Collection[str] = ()
    judges: Mapping[str, OutputJudges] = field(default_factory=dict)
    observed: Mapping[tuple[str, str], ObservedKernels] = field(default_factory=dict)


def run(
    operators: Sequence[str | Operator] | None = None,
    impls: Sequence[str | Implementation] | None = None,
    cases: Sequence[str] | None = None,
    directions: Sequence[str] | None = None,
    device: str | None = None,
    *,
    all_cases: bool = False,
    quick: bool = False,
    batch_invariant: bool = False,
    budget: Budget | None = None,
    ceilings: Ceilings | None = None,
    patience: float | None = None,
    on_event: Log = no_log,
    workers: Mapping[str, WorkerProcess] | None = None,
    baselines: Mapping[str, Implementation] | None = None,
    without: Collection[str] = (),
) -> Iterator[Record]:
    """Return the records of :func:`run_points` one by one; arguments and errors are the same."""
    groups = run_points(
        operators,
        impls,
        cases,
        directions,
        device,
        all_cases=all_cases,
        quick=quick,
        batch_invariant=batch_invariant,
        budget=budget,
        ceilings=ceilings,
        patience=patience,
        on_event=on_event,
        workers=workers,
        baselines=baselines,
        without=without,
    )
    return (record for group in groups for record in group)


def run_points(
    operators: Sequence[str | Operator] | None = None,
    impls: Sequence[str | Implementation] | None = None,
    cases: Sequence[str] | None = None,
    directions: Sequence[str] | None = None,
    device: str | None = None,
    *,
    all_cases: bool = False,
    quick: bool = False,
    first_look: bool = False,
    batch_invariant: bool = False,
    budget: Budget | None = None,
    ceilings: Ceilings | None = None,
    patience: float | None = None,
    seed: int = 0,
    on_event: Log = no_log,
    workers: Mapping[str, WorkerProcess] | None = None,
    baselines: Mapping[str, Implementation] | None = None,
    without: Collection[str] = (),
    verdicts: Mapping[tuple[str, str], Verdict] | None = None,
    trusted: Collection[str] = (),
    judges: Mapping[str, OutputJudges] | None = None,
    observed: Mapping[tuple[str, str], ObservedKernels] | None = None,
    on_start: Callable[[list[float]], None] | None = None,
) -> Iterator[list[Record]]:
    """Check and time these operators; yield the records of each point as soon as it is done.

    By default every operator's first bench case of the device, in every direction; ``all_cases``
    takes all of them, ``cases`` names some. ``operators`` and ``impls`` may be objects as well as
    names, for those outside the registry. With ``patience`` (seconds) forward comes first, and a
    backward that would begin later is left out and logged. ``on_event`` gets one line of progress at
    a time, ``on_start`` the expected seconds of each point. ``workers`` are the worker processes of
    external implementations by name: those are checked and timed there, started anew for each point,
    on seeds from the operating system.
    ``baselines`` set the tolerance of operators outside the registry. ``without`` names checks to
    leave out, of the check and of the timing. ``verdicts``, by implementation and case, are those of
    a check that the caller has just made: they stand, and the check is not repeated. ``judges``, by case,
    judge the timed outputs there, with that check's bounds. ``observed``, by implementation and case, are
    kernels that the caller has just observed there. ``trusted`` names references in worker processes: they
    are timed under the same conditions as the others, twice in each round, and their timed calls are not
    examined. ``batch_invariant`` adds to each implementation its batch-invariant variant, timed beside it.

    With ``first_look`` the whole run is short: one implementation for each backend unless ``impls`` names
    some, a smaller budget, and one seed at the large case after all seeds at a small check case.

    Raises :class:`WeftError` before anything runs: for an unknown name, or if ``batch_invariant`` is asked
    for and no chosen implementation has a variant.
    """
    device = device or machine.default_device()
    chosen = select_points(operators, impls, cases, directions, device, all_cases, baselines)
    points = [without_external_baseline(p, workers or {}, baselines or {}) for p in chosen]
    budget = budget or Budget.for_device(device, quick)
    if first_look:
        seconds = min(budget.seconds, FIRST_LOOK_SECONDS[device])
        budget = replace(budget, seconds=seconds, side_samples=3, recheck_seconds=0.5, sustained_seconds=0.0)
        if not impls:
            points = [_without_variants(p) for p in points]
    if batch_invariant:
        points = _with_variants(points)
    if ceilings is None:
        ceilings = measured_ceilings(device, progress=on_event)
    fingerprint = machine.fingerprint(device) | {"ceilings": asdict(ceilings) if ceilings else None}
    if patience is not None:
        # The sort is stable: each direction keeps the order in which its points were selected.
        points.sort(key=lambda p: p.direction == BACKWARD)
    if on_start is not None:
        on_start(expected_bench_seconds(points, budget))
    options = _Options(
        budget=budget,
        seed=seed,
        log=on_event,
        workers=workers or {},
        without=without,
        first_look=first_look,
        verdicts=verdicts or {},
        trusted=trusted,
        judges=judges or {},
        observed=observed or {},
    )
    return _run(points, options, ceilings, fingerprint, patience)


def _with_variants(points: Sequence[BenchPoint]) -> list[BenchPoint]:
    both = [with_variants(p) for p in points]
    if not any(i.is_variant for p in both for i in p.implementations):
        raise WeftError(
            "batch invariance",
            expected="an implementation with a batch-invariant variant",
            got=", ".join(dict.fromkeys(f"{i.operator} {i.name}" for p in points for i in p.implementations)),
            hint="weft help dispatch lists the operators that have one",
        )
    return both


def _without_variants(point: BenchPoint) -> BenchPoint:
    """Return the point with one implementation for each backend: no ladder steps, no variants."""
    main_ones = tuple(i for i in point.implementations if "/" not in i.name)
    return replace(point, implementations=main_ones)


def _run(
    points: Sequence[BenchPoint],
    options: _Options,
    ceilings: Ceilings | None,
    fingerprint: Mapping[str, Any],
    patience: float | None,
) -> Iterator[list[Record]]:
    start = _now()
    for number, point in enumerate(points, 1):
        late = patience is not None and _now() - start > patience * 1e9
        if late and point.direction == BACKWARD:
            skipped = ", ".join(p.operator.name for p in points[number - 1 :])
            options.log(f"Skipped backward ({skipped}). Run it with: weft bench --direction backward")
            return
        progress = partial(_log_with_prefix, options.log, f"[{number}/{len(points)}] {point.title}: ")
        before = measure_load(point.device)
        # The caller has just started the workers of the first point.
        results = _bench_point(point, replace(options, log=progress), restart_external=number > 1)
        # The busier of two readings, since load at either end may have disturbed the times between them.
        load = busier(before, measure_load(point.device)).to_json()
        here = {**fingerprint, "load": load}
        yield [make_record(point, i, results[i.name], ceilings, here) for i in point.implementations]
        del results
        free_memory(point.device)


def _log_with_prefix(log: Log, prefix: str, line: str) -> None:
    log(prefix + line)


def _bench_point(point: BenchPoint, options: _Options, restart_external: bool) -> dict[str, BenchResult]:
    """Check every implementation at a point, then time those that passed, side by side."""
    results: dict[str, BenchResult] = {}
    passed: list[Implementation] = []
    broken = restart_workers(point, options.workers) if restart_external else {}
    oracle = _oracle(point, CHECK_SEEDS)
    small = _small_point(point) if options.first_look else None
    # One seed is enough for what passes all seeds at the small point; the others get `oracle`.
    quick_oracle = _oracle(point, 1) if small else oracle
    for implementation in point.implementations:
        name = implementation.name
        try:
            if name in broken:
                raise SandboxDied(broken[name])
            answer = support(implementation, point.case, point.device, point.direction)
        except (SandboxDied, WorkerError) as error:
            verdict = _verdict(point, implementation, FAIL, f"channel: {error}")
            results[name] = BenchResult(verdict=verdict)
            continue
        # What runs in an interpreter here is supported but not timed: `weft check` checks it.
        if not (answer.ok and answer.timed):
            verdict = _verdict(point, implementation, UNSUPPORTED, answer.reason)
            results[name] = BenchResult(verdict=verdict)
            continue
        if verdict_before := options.verdicts.get((name, point.case.name)):
            results[name] = BenchResult(verdict=verdict_before)
            passed += [implementation] if verdict_before.status == PASS else []
            continue
        options.log(f"checking {name}")
        checked_small = small is not None and _passes_small(small, implementation, options)
        results[name] = _check(point, implementation, quick_oracle if checked_small else oracle, options)
        if results[name].verdict.status == PASS:
            passed.append(implementation)
    if passed:
        grad = _grad_form(oracle)
        # Their float64 outputs would take the memory that timing needs for its buffers.
        del oracle, quick_oracle
        options.log(f"timing {', '.join(i.name for i in passed)}")
        for name, outcome in _time(point, passed, grad, results, options).items():
            _add_outcome(results[name], outcome)
        _add_kernels(point, passed, grad, results, options)
    return results


def _oracle(point: BenchPoint, seeds: int) -> Oracle:
    """Return one float64 reference for all implementations, on seeds that none can predict."""
    unpredictable = fresh_seeds(seeds)
    return Oracle(point.operator, point.case, point.direction, point.device, unpredictable, point.baseline)


def _small_point(point: BenchPoint) -> BenchPoint | None:
    """Return the point at the operator's first check case of the same dtype; None without one."""
    cases = point.operator.select("check", point.device)
    case = next((c for c in cases if c.dtype == point.case.dtype), None)
    return replace(point, case=case) if case else None


def _passes_small(small: BenchPoint, implementation: Implementation, options: _Options) -> bool:
    """Return True if an implementation passes at the small point.

    ``compile`` is left out, since it compiles anew for each shape.
    """
    # External code is checked at all seeds of the large case.
    if implementation.backend == "compile" or implementation.name in options.workers:
        return False
    answer: Support = support(implementation, small.case, small.device, small.direction)
    return bool(answer) and (
        check(
            small.operator,
            implementation,
            small.case,
            small.direction,
            small.device,
            without=options.without,
            baseline=small.baseline,
        ).status
        == PASS
    )


def _add_kernels(
    point: BenchPoint,
    passed: Sequence[Implementation],
    grad: ShapeDtype | None,
    results: Mapping[str, BenchResult],
    options: _Options,
) -> None:
    """Add the names of the observed kernels, in a pass of its own after all the timing."""
    free_memory(point.device)
    for implementation in passed:
        result = results[implementation.name]
        examined = implementation.name not in options.trusted and "provenance" not in options.without
        if result.timing is not None and examined:
            observed = options.observed.get((implementation.name, point.case.name)) or observe_kernels(
                point, implementation, grad, options.workers.get(implementation.name)
            )
            result.kernels = observed.kernels
            result.flags |= observed.flags


def _grad_form(oracle: Oracle) -> ShapeDtype | None:
    """Return the shape and dtype of a backward's incoming gradient; None in the forward."""
    if oracle.direction != BACKWARD:
        return None
    form = oracle.grad_form
    return form.shape, form.dtype


def _add_outcome(result: BenchResult, outcome: Outcome) -> None:
    result.timing = outcome.timing
    if outcome.refusal:
        result.verdict = replace(result.verdict, status=FAIL, reason=outcome.refusal)
    if outcome.trouble:
        result.flags.add(f"not timed: {outcome.trouble}")


def _verdict(point: BenchPoint, implementation: Implementation, status: str, reason: str) -> Verdict:
    return Verdict(
        operator=point.operator.name,
        implementation=implementation.name,
        case=point.case.name,
        direction=point.direction,
        status=status,
        reason=reason,
    )


def _check(
    point: BenchPoint, implementation: Implementation, oracle: Oracle, options: _Options
) -> BenchResult:
    """Time the first call, then check. The check judges a first call that raises."""
    # Before the check, whose calls would compile the kernel: this time includes the compilation.
    first_call_us = None
    worker = options.workers.get(implementation.name)
    # A reference does not try to deceive: few calls are enough to find that it cannot be run.
    without = {*options.without, "many"} if implementation.name in options.trusted else options.without
    try:
        grad = _grad_form(oracle)
        if worker is None:
            first_call_us = _first_call(point, implementation, grad, options.seed)
        else:
            request = _request(point, implementation, grad)
            # A seed from the system: the code must not have stored the answer to this call.
            first_call_us = measure_first_call(worker.sandbox, request, fresh_seeds(1)[0])
    except Exception:  # noqa: BLE001 - the check makes the same call and reports what it raises
        free_memory(point.device)
    verdict = check(
        point.operator,
        implementation,
        point.case,
        point.direction,
        point.device,
        oracle=oracle,
        without=without,
        make_caller=make_local_caller if worker is None else worker.make_caller,
    )
    return BenchResult(verdict=verdict, first_call_us=first_call_us)


def _request(point: BenchPoint, implementation: Implementation, grad: ShapeDtype | None) -> dict[str, Any]:
    """Return the names by which a worker process knows this point."""
    names = (point.operator.name, implementation.name, point.case.name)
    return describe_point(*names, point.direction, point.device, grad)


def _first_call(
    point: BenchPoint, implementation: Implementation, grad: ShapeDtype | None, seed: int
) -> float:
    """Return the wall time (us) of binding and calling for the first time, compilation included."""
    # Generated and waited for before the clock starts: inputs are no part of the first call.
    buffers = allocate_buffers(point.case, point.device, grad, seed)
    synchronise(point.device)
    start = _now()
    _bind(point, implementation, buffers)()
    synchronise(point.device)
    return (_now() - start) / 1000


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _bind(point: BenchPoint, implementation: Implementation, buffers: InputBuffers) -> Callable[[], Any]:
    call = bind(point.operator, implementation, point.case, point.direction, buffers.inputs, buffers.grad)
    if implementation.outputs is None or point.direction != FORWARD:
        return call
    return lambda: LeadingOutputs(call())


def _time(
    point: BenchPoint,
    passed: Sequence[Implementation],
    grad: ShapeDtype | None,
    results: Mapping[str, BenchResult],
    options: _Options,
) -> dict[str, Outcome]:
    """Time the implementations that passed, side by side; return an outcome for each name."""

    def on_round(number: int, medians: Mapping[str, float]) -> None:
        best = min(medians, key=medians.__getitem__, default="")
        if best:
            options.log(f"round {number + 1}, fastest so far {best} at {medians[best]:.1f} us")

    free_memory(point.device)
    make_judge = options.judges.get(point.case.name) or OutputJudges(
        point.operator, point.case, point.direction, point.device, point.baseline
    )
    outcomes: dict[str, Outcome] = {}
    candidates = []
    for implementation in passed:
        first_call_us = results[implementation.name].first_call_us
        try:
            candidates.append(_candidate(point, implementation, grad, first_call_us, options))
        except (SandboxDied, WorkerError) as error:
            outcomes[implementation.name] = Outcome(trouble=f"its process: {error}")
    # External code must not be able to predict any seed; for Weft's own a run can be repeated.
    any_external = any(c.backend is not None for c in candidates)
    try:
        with annotate(f"timing {point.title}"):
            return outcomes | measure(
                candidates,
                partial(allocate_buffers, point.case, point.device, grad),
                device=point.device,
                budget=options.budget,
                make_judge=make_judge,
                seed=None if any_external else options.seed,
                on_round=on_round,
                without=options.without,
            )
    except (torch.OutOfMemoryError, MemoryError):
        free_memory(point.device)
        return {i.name: Outcome(trouble="out of memory") for i in passed}


def _candidate(
    point: BenchPoint,
    implementation: Implementation,
    grad: ShapeDtype | None,
    first_call_us: float | None,
    options: _Options,
) -> Candidate:
    worker = options.workers.get(implementation.name)
    backend, trusted = None, implementation.name in options.trusted
    if worker is not None:
        request = _request(point, implementation, grad)
        backend = RemoteTimingBackend(worker.sandbox, request, point.device, options.without, trusted)
    return Candidate(
        name=implementation.name,
        bind=partial(_bind, point, implementation),
        first_call_us=first_call_us,
        backend=backend,
        worker=worker,
        trusted=trusted,
    )


def free_memory(device: str) -> None:
    """Free the memory of the last case, so that the next one finds the device empty."""
    with part("freeing memory"):
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        return_freed_memory()


def went_against(records: Sequence[Record], *, own_code: bool = False) -> bool:
    """Return True for a fail, a suspect time, or a pass without a time among the records.

    With ``own_code`` no implementation is external, so that none deceives a clock: a suspicion that a busy
    machine can cause then goes against none (:func:`~weft.workbench.records.is_suspect_by_load`).
    """
    return any(
        r.verdict.status == FAIL
        or (r.verdict.status == PASS and r.timing is None)
        or (bool(suspect_flags([r])) and not (own_code and is_suspect_by_load(r)))
        for r in records
    )


__all__ = ["BenchPoint", "BenchResult", "Budget", "make_record", "run", "run_points", "went_against"]
