"""Tuning: make the tables that dispatch reads, from records or from new measurements.

The points of a shipped table come from committed records. On a user's machine they are measured: within ten
minutes the cases whose choice is most uncertain (``tuning/plan.py``); or, thoroughly, each bench case, and
below the first case of each dtype a sweep down to small sizes, with an extra point where the choice changes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from weft.core import BACKWARD, FORWARD, Case, Operator, Record, WeftError, registry
from weft.core.cases import is_tuned
from weft.core.implementation import INVARIANT
from weft.core.json_files import read_json
from weft.core.log import Log, no_log
from weft.core.record import PASS
from weft.dispatch import choice as dispatch
from weft.dispatch import keys
from weft.dispatch.choice import BASELINES, Point
from weft.dispatch.keys import Flags
from weft.dispatch.operator import clear_caches
from weft.workbench.timing.plan import Budget
from weft.workbench.tuning.audit_points import model_shapes
from weft.workbench.tuning.plan import BUDGET, LIMIT_SECONDS, PlannedCase, measured, point_seconds

SHARES = (8, 64, 512)  # divisors of a bench case's rows: the points of the sweep
MAX_ELEMENTS, MAX_PRODUCT = 1 << 28, 1 << 39  # of an input; multiplications
PLAIN_PRODUCTS = ("matmul", "linear", "linear_gelu", "linear_residual")  # up and down in a model's MLP
# A program for each row of a sparse matrix: fast where rows are even, ten times slower where one is long.
EVEN_ROWS = (("spmm", "triton"), ("spmv", "triton"))
HOST_RECORDS = "host-time*.json"  # of weft.lab.host_time, in the folder of a device's records
MIN_ELEMENTS = 1024  # of a swept case: below it every call takes the host's time alone


def point_of(operator: Operator, case: Case, records: Iterable[Record]) -> Point | None:
    """Return the point of a case for dispatch; None if no baseline was timed there.

    The last record of each implementation counts; a time of an earlier run is brought to the last run's
    conditions (:func:`_in_last_run`). Left out: failed and suspect records, steps of ladders, batch-invariant
    variants, which are chosen by request alone, ``compile``, which costs a user seconds at the first call
    of each shape, and what loses by far at contents that no call tells (``EVEN_ROWS``).
    """
    ordered = sorted((r for r in records if (r.operator, r.implementation) not in EVEN_ROWS), key=_run_of)
    times = {d: _in_last_run([r for r in ordered if r.direction == d]) for d in (FORWARD, BACKWARD)}
    if not any(b in times[FORWARD] for b in BASELINES):
        return None
    if operator.differentiable and not operator.cost(case, BACKWARD).written:
        # The gradient is a view and costs nothing, whichever implementation computed the output.
        times[BACKWARD] = dict.fromkeys(times[FORWARD], (0.0, 0.0))
    key = keys.lookup_key(operator.name, case.inputs, case.params)
    return Point(
        operator=operator.name,
        case=case.name,
        **vars(key),
        forward=times[FORWARD],
        backward=times[BACKWARD],
    )


def _run_of(record: Record) -> str:
    """Return the run that a record is of: its records of a point have the same date."""
    return str(record.machine.get("date"))


def _in_last_run(records: Sequence[Record]) -> dict[str, tuple[float, float]]:
    """Return the time and host time of each implementation at one point, from records in order of their runs.

    The same card is faster or slower by several percent from night to night, with its power and temperature.
    A time of an earlier run is therefore multiplied by the time of a baseline in the last run, and divided by
    the baseline's time in that one.
    """
    runs: dict[str, dict[str, float]] = {}
    last: dict[str, tuple[str, float, float]] = {}
    for record in records:
        name, run = record.implementation, _run_of(record)
        is_step = name.partition("/")[2][:2].isdigit()
        if is_step or name.endswith(INVARIANT) or record.backend == "compile":
            continue
        # Removed first: if the last record of an implementation failed, an older time must not stay.
        last.pop(name, None)
        suspect = any(f.startswith("suspect") for f in record.flags)
        if record.verdict.status == PASS and record.timing is not None and not suspect:
            cold = record.timing.cold
            last[name] = (run, cold, record.timing.host or cold)
            runs.setdefault(run, {})[name] = cold
    newest = next((r for r in reversed(runs) if any(b in runs[r] for b in BASELINES)), None)

    def factor(run: str) -> float:
        if newest is None or run >= newest:
            return 1.0
        return next(
            (runs[newest][b] / runs[run][b] for b in BASELINES if b in runs[run] and b in runs[newest]), 1.0
        )

    return {name: (round(cold * factor(run), 3), round(host, 3)) for name, (run, cold, host) in last.items()}


def from_records(records: Iterable[Record]) -> dict[str, list[Point]]:
    """Return the points by device, from GPU records at cases of the registry's operators.

    Cases that ``weft tune`` made of the operators' own count too. Records of external candidates are left
    out: dispatch can call only the registry's implementations.
    """
    groups: dict[str, dict[tuple[str, str], list[Record]]] = {}
    for record in records:
        known = record.operator in registry.REGISTRY
        builtin = registry.implementation_names(record.operator) if known else []
        if record.machine.get("kind") == "cuda" and record.implementation in builtin:
            by_case = groups.setdefault(str(record.machine.get("device")), {})
            by_case.setdefault((record.operator, record.case), []).append(record)
    points: dict[str, list[Point]] = {}
    for device, cases in groups.items():
        for (name, case_name), case_records in cases.items():
            operator, case = registry.operator(name), case_named(name, case_name)
            point = point_of(operator, case, case_records) if case else None
            if point is not None:
                points.setdefault(device, []).append(point)
    return points


def case_named(operator: str, name: str) -> Case | None:
    """Return an operator's case, or one that tuning makes of it (:func:`candidates`), by its name."""
    own = next((c for c in registry.operator(operator).cases if c.name == name), None)
    return own or (_tuned_cases(operator).get(name) if is_tuned(name) else None)


@cache
def _tuned_cases(operator: str) -> dict[str, Case]:
    return {case.name: case for _, case in candidates([operator], "cuda")}


def facts_of(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Return, by device, the facts that a table has beside its points: those of the newest record with them.

    ``arch`` (``sm_90``), ``units`` (SMs) and ``copy``, the copy ceiling in bytes/s, by which devices of one
    architecture use each other's tables.
    """
    facts: dict[str, dict[str, Any]] = {}
    for record in sorted(records, key=lambda r: str(r.machine.get("date"))):
        machine, ceilings = record.machine, record.machine.get("ceilings")
        if machine.get("kind") == "cuda" and ceilings and machine.get("arch"):
            entry = {"arch": machine["arch"], "units": machine.get("units"), "copy": ceilings["copy"]}
            facts[str(machine.get("device"))] = entry
    return facts


def host_times_of(device: str, folder: Path) -> dict[str, Any]:
    """Return the host times of a device's records in ``folder`` as the entry ``host`` of its table.

    They are the records of ``weft.lab.host_time``, by dtype; of an operator the newest one counts. No entry
    without a record of this device.
    """
    host: dict[str, dict[str, Any]] = {}
    for record in sorted(map(read_json, folder.glob(HOST_RECORDS)), key=lambda r: str(r["machine"]["date"])):
        if record["machine"]["device"] == device and "forward_us" in record:
            by_name = {name: _host_times(record, name) for name in record["us"]}
            host.setdefault(record["dtype"], {}).update(by_name)
    return {"host": host} if host else {}


def _host_times(record: Mapping[str, Any], name: str) -> dict[str, list[float]]:
    """Return an operator's host times by implementation: without a gradient; and if measured, with one."""
    parts = [p[name] for p in (record[k] for k in ("us", "forward_us", "backward_us")) if name in p]
    impls = registry.implementation_names(name)
    return {i: [p[i] for p in parts] for i in impls if all(i in p for p in parts)}


def scaled(case: Case, share: int) -> Case | None:
    """Return the case with its rows divided by ``share``; None if too few elements would remain.

    Each dimension whose size is that of the first input's first dimension is divided.
    """
    shape = case.inputs[0].shape
    rows = shape[0] // share if shape else 0
    if rows < 1:
        return None
    inputs = tuple(
        replace(i, shape=tuple(rows if d == shape[0] else d for d in i.shape)) for i in case.inputs
    )
    if sum(i.numel for i in inputs) < MIN_ELEMENTS:
        return None
    # The case's generator is bound to the full shape; `Operator.__post_init__` binds it to this one.
    return replace(case, name=f"{case.name}/{share}", inputs=inputs, draw=None)


_now = time.monotonic
Measure = Callable[[Operator, Case], Point | None]
Save = Callable[[Sequence[Record]], None]  # gets the records of each case as soon as it is measured


def _save_nothing(records: Sequence[Record]) -> None:
    pass


def sweep(operator: Operator, device: str, measure: Measure) -> Iterator[Point]:
    """Yield the points of an operator: its bench cases, and a sweep below the first case of each kind.

    Cases are of one kind if they have the same dtype and the same flags.
    """
    swept: set[tuple[str, Flags]] = set()
    for case in operator.select("bench", device):
        kind = _kind(operator, case)
        point = measure(operator, case)
        if point is not None:
            yield point
        if kind not in swept:
            swept.add(kind)
            yield from _sweep_down(operator, case, point, measure)


def _kind(operator: Operator, case: Case) -> tuple[str, Flags]:
    key = keys.lookup_key(operator.name, case.inputs, case.params)
    return key.dtype, key.flags


def _sweep_down(operator: Operator, case: Case, top: Point | None, measure: Measure) -> Iterator[Point]:
    """Yield points at shares of the case's rows, with one more where the choice changes between two."""
    larger, larger_share = top, 1
    for share in SHARES:
        smaller = scaled(case, share)
        point = measure(operator, smaller) if smaller else None
        if point is None:
            return
        yield point
        if larger is not None and _choices(larger) != _choices(point):
            # The crossover lies between: measure at the geometric mean, since sizes fall by factors.
            middle_case = scaled(case, round((larger_share * share) ** 0.5))
            middle = measure(operator, middle_case) if middle_case else None
            if middle is not None:
                yield middle
        larger, larger_share = point, share


def _choices(point: Point) -> tuple[str, str]:
    return dispatch.best(point, False), dispatch.best(point, True) if point.backward else ""


def candidates(names: Sequence[str] | None, device: str) -> list[tuple[Operator, Case]]:
    """Return the cases of the named operators, or of all, that a quick tuning may measure.

    These are every bench case, each with its rows divided by ``SHARES``, and, for rows and products, the
    first case of each kind with the dimensions of models that people run, with so many rows that its float64
    reference takes no more than that of a bench case.
    """
    cases: list[tuple[Operator, Case]] = []
    # Dropout has one mask in all of Weft's kernels, which torch has not: there is nothing to choose.
    for name in names or [n for n in registry.operator_names() if "dropout" not in n]:
        operator = registry.operator(name)
        bench_cases = operator.select("bench", device)
        first = {_kind(operator, c): c for c in reversed(bench_cases) if _has_distinct_sizes(operator, c)}
        other = [_fewer_rows(operator, case, share) for case in bench_cases for share in SHARES]
        other += [resized(case, changes) for case in first.values() for changes in _of_models(operator, case)]
        cases += [(operator, case) for case in (*bench_cases, *other) if case is not None]
    return cases


def _sizes(operator: Operator, case: Case) -> keys.Sizes:
    return keys.lookup_key(operator.name, case.inputs, case.params).sizes


def _has_distinct_sizes(operator: Operator, case: Case) -> bool:
    """True if each size can be changed without another one."""
    sizes = _sizes(operator, case)
    return len({*sizes}) == len(sizes)


def _fewer_rows(operator: Operator, case: Case, share: int) -> Case | None:
    """Return the case with a share of its rows; None where that would change another of its sizes too."""
    smaller = scaled(case, share)
    if smaller is None:
        return None
    pairs = zip(_sizes(operator, case), _sizes(operator, smaller), strict=True)
    changed = sum(a != b for a, b in pairs)
    return smaller if changed == 1 else None


def resized(case: Case, changes: Mapping[int, int]) -> Case | None:
    """Return the case with other sizes in place of the keys of ``changes``, in each dimension that has one.

    None if two dimensions of an input that change apart have one size, so that the result would be another
    kind of call.
    """
    shapes = [i.shape for i in case.inputs]
    if any(sum(d == size for d in shape) > 1 for shape in shapes for size in changes):
        return None
    inputs = tuple(replace(i, shape=tuple(changes.get(d, d) for d in i.shape)) for i in case.inputs)
    name = "x".join(str(new) for new in changes.values())
    return replace(case, name=f"{case.name}@{name}", inputs=inputs, draw=None)


def _of_models(operator: Operator, case: Case) -> Iterator[dict[int, int]]:
    """Yield the changes of a case's sizes, old to new, that make it a call of each model."""
    sizes = _sizes(operator, case)
    family, pairs = keys.family(operator.name), set[tuple[int, int]]()
    if operator.name == "rope" or len(case.inputs[0].shape) != 2:
        return  # its rows are of heads, and its tables' rows follow from other sizes
    for model in model_shapes()["models"]:
        if operator.name in ("softmax", "cross_entropy", "linear_cross_entropy"):
            n = model.get("vocab", model["width"])
        else:
            n = model["mlp"] if family == "product" or operator.name == "bias_gelu" else model["width"]
        k = model["width"]
        pairs |= {(n, k), (k, n)} if operator.name in PLAIN_PRODUCTS else {(n, k)}
    *_, rows = sizes
    for n, k in sorted(pairs):
        if family == "product" and n != k:
            fewer = min(rows, MAX_PRODUCT // (n * k), MAX_ELEMENTS // max(n, k))
            yield {sizes[0]: n, sizes[1]: k, rows: fewer}
        elif family == "rows" and n != sizes[0]:
            yield {sizes[0]: n, rows: min(rows, MAX_ELEMENTS // n)}


def expected_seconds(names: Sequence[str] | None, device: str) -> list[float]:
    """Return the expected seconds of each point of :func:`measure_points`, without those at crossovers."""
    expected: list[float] = []
    budget = Budget.for_device(device)
    for name in names or registry.operator_names():
        operator = registry.operator(name)
        swept = set()
        for case in operator.select("bench", device):
            expected.append(point_seconds(operator, case, device, budget))
            if (kind := _kind(operator, case)) not in swept:
                swept.add(kind)
                for smaller in map(partial(scaled, case), SHARES):
                    if smaller is None:
                        break
                    expected.append(point_seconds(operator, smaller, device, budget))
    return expected


def measure_points(
    names: Sequence[str] | None, device: str, *, on_event: Log = no_log, save: Save = _save_nothing
) -> Iterator[Point]:
    """Measure thoroughly on this machine; yield the points of the named operators, or of all.

    The workbench checks and then times every implementation except ``compile`` and steps of ladders,
    forward and backward. Raises :class:`WeftError` for an unknown name before anything runs.
    """
    chosen = [registry.operator(n) for n in names or registry.operator_names()]
    for operator in chosen:
        yield from sweep(operator, device, partial(_measure, device, None, on_event, save))


def measure_planned(
    planned: Sequence[PlannedCase],
    device: str,
    *,
    limit: float = LIMIT_SECONDS,
    on_event: Log = no_log,
    save: Save = _save_nothing,
    names: Sequence[str] | None = None,
) -> Iterator[Point | None]:
    """Measure planned cases quickly; yield the point of each, None where no baseline could be timed.

    ``names`` are the implementations to measure; None: all that dispatch may choose.

    No case begins that would end after ``limit`` seconds, if the rest takes as much longer than expected as
    what is done.
    """
    start, expected = _now(), 0.0
    for number, case in enumerate(planned):
        spent = _now() - start
        slower = max(1.0, spent / expected) if expected else 1.0
        if number and spent + slower * case.seconds > limit:
            on_event(f"{len(planned) - number} cases left out: {limit / 60:g} minutes are over")
            return
        yield _measure(device, BUDGET, on_event, save, case.operator, case.case, names)
        expected += case.seconds


def _measure(
    device: str,
    budget: Budget | None,
    on_event: Log,
    save: Save,
    operator: Operator,
    case: Case,
    names: Sequence[str] | None = None,
) -> Point | None:
    from weft.workbench import bench

    implementations = measured(operator.name, names)
    # The bench selects by tag: a copy of the operator with this case alone, tagged for it.
    with_case = replace(operator, cases=(replace(case, tags=frozenset({"bench"})),))
    options: dict[str, Any] = {"all_cases": True, "budget": budget, "on_event": on_event}
    records = list(bench.run([with_case], implementations, device=device, **options))
    save(records)
    return point_of(with_case, case, records)


def write(
    path: Path, device: str, points: Iterable[Point], source: str, facts: Mapping[str, Any] | None = None
) -> None:
    """Write a table, one point a line. Raises :class:`WeftError` if it cannot be written.

    ``facts`` are the device's, as :func:`facts_of` returns them.
    The file is replaced atomically, so a reader in another process never sees half a table.
    """
    ordered = sorted(points, key=lambda p: (p.operator, p.dtype, p.last, p.elements, p.case))
    header = {"format": dispatch.FORMAT, "device": device, "from": source, **(facts or {})}
    lines = ",\n".join(json.dumps(p.to_json(), separators=(",", ":")) for p in ordered)
    # The header without its closing brace, then a point a line, so that a diff shows the changed points.
    text = json.dumps(header)[:-1] + ', "points": [\n' + lines + "\n]}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, since a rename is atomic only within one file system.
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)  # mkstemp's 0600 would hide a shipped table from other users
        os.replace(name, path)
    except OSError as error:
        got = error.strerror or str(error)
        raise WeftError(f"the table could not be written to {path}", got=got) from error
    clear_caches()


def store(device: str, points: Iterable[Point]) -> Path:
    """Add points to this machine's own table, in place of those of the same cases; return its path.

    A table of an older format is replaced.
    """
    path = dispatch.own_table(device)
    known: Mapping[tuple[str, str], Point] = {}
    if path.exists() and not dispatch.is_outdated(path):
        known = {(p.operator, p.case): p for p in dispatch.read(path)}
    measured_points = {(p.operator, p.case): p for p in points}
    write(path, device, {**known, **measured_points}.values(), "weft tune")
    return path


def rows(points: Iterable[Point]) -> list[dict[str, Any]]:
    """Return a row for each point: the choice for inference and for training, with their times.

    ``base_us`` is the time of the better of eager and torch. Training adds up both directions.
    """
    listed = []
    ordered = sorted(points, key=lambda p: (p.operator, p.dtype, p.last, p.elements))
    for p in ordered:
        row: dict[str, Any] = {"operator": p.operator, "case": p.case, "dtype": p.dtype}
        row |= {"elements": p.elements, "last": p.last}
        for use, with_grad in (("inference", False), ("training", True)):
            if with_grad and not p.backward:
                continue
            name = dispatch.best(p, with_grad)
            directions = (p.forward, p.backward) if with_grad else (p.forward,)
            baselines = [b for b in BASELINES if all(b in t for t in directions)]
            if not baselines or any(name not in t for t in directions):
                continue
            us = sum(t[name][0] for t in directions)
            base_us = min(sum(t[b][0] for t in directions) for b in baselines)
            row[use] = {"choice": name, "us": round(us, 3), "base_us": round(base_us, 3)}
        listed.append(row)
    return listed


def crossovers(operator: str | None = None) -> str:
    """Return the choices of the shipped tables as Markdown tables, for the docs."""
    from weft.workbench.report.markdown import table
    from weft.workbench.report.scales import NONE, time, times

    sections = []
    for path in sorted(dispatch.SHIPPED.glob("*.json")):
        points = [p for p in dispatch.read(path) if operator in (None, p.operator)]
        body = []
        for row in rows(points):
            cells = [row["operator"], f"`{row['case']}`"]
            for use in ("inference", "training"):
                choice = row.get(use)
                gain = times(choice["base_us"] / choice["us"]) if choice and choice["us"] else NONE
                cells += [choice["choice"], time(choice["us"]), gain] if choice else [NONE] * 3
            body.append(cells)
        head = ("operator", "case", "inference", "time", "gain", "training", "time", "gain")
        name = read_json(path)["device"]
        sections.append(f"**{name}**\n\n{table(head, body, '   rr rr')}")
    return "\n".join(sections) or "No table is shipped yet.\n"
