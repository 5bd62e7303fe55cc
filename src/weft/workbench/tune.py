"""Tune: from records to the table that dispatch looks up, and the records that a table lacks.

A table's points come from committed records (the shipped tables), or are measured here: each bench
case, and from the first of every dtype down to small sizes, closer where the choice changes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.core import BACKWARD, FORWARD, Case, Implementation, Operator, Record, WeftError, registry
from weft.core.record import PASS
from weft.ops._shared import dispatch
from weft.ops._shared.dispatch import BASE, Point

Say = Callable[[str], None]
SHARES = (8, 64, 512)  # of a bench case's rows, where the sweep goes first
FEWEST = 1024  # elements, below which every call is the host's


def _silent(line: str) -> None:
    return None


def point_of(operator: Operator, case: Case, records: Iterable[Record]) -> Point | None:
    """What dispatch is to know of a case; None where the base was not timed there.

    Of each implementation the last record counts. Left out: what failed or is suspect, ladders'
    steps, and ``compile``, which costs a user seconds at the first call of each shape.
    """
    times: dict[str, dict[str, tuple[float, float]]] = {FORWARD: {}, BACKWARD: {}}
    for one in records:
        step = one.implementation.partition("/")[2][:2].isdigit()
        if step or one.backend == "compile":
            continue
        here = times[one.direction]
        here.pop(one.implementation, None)
        suspect = any(f.startswith("suspect") for f in one.flags)
        if one.verdict.status == PASS and one.timing is not None and not suspect:
            cold = one.timing.cold
            here[one.implementation] = (round(cold, 3), round(one.timing.host or cold, 3))
    if not any(b in times[FORWARD] for b in BASE):
        return None
    if operator.differentiable and not operator.cost(case, BACKWARD).written:
        # The gradient is a view: whoever computed the output, it costs nothing.
        times[BACKWARD] = dict.fromkeys(times[FORWARD], (0.0, 0.0))
    dtype, elements, last = dispatch.described(case.inputs)
    return Point(
        operator=operator.name,
        case=case.name,
        dtype=dtype,
        elements=elements,
        last=last,
        flags=dispatch.words_of(case.params),
        forward=times[FORWARD],
        backward=times[BACKWARD],
    )


def from_records(records: Iterable[Record]) -> dict[str, list[Point]]:
    """Points by device, from records of a GPU at cases that the registry's operators have; what a
    user brought is not among what a call may be given."""
    groups: dict[str, dict[tuple[str, str], list[Record]]] = {}
    for one in records:
        ours = registry.REGISTRY.get(one.operator, {})
        if one.machine.get("kind") == "cuda" and one.implementation in ours:
            of = groups.setdefault(str(one.machine.get("device")), {})
            of.setdefault((one.operator, one.case), []).append(one)
    found: dict[str, list[Point]] = {}
    for device, cases in groups.items():
        for (name, case_name), here in cases.items():
            operator = registry.operator(name)
            case = next((c for c in operator.cases if c.name == case_name), None)
            point = point_of(operator, case, here) if case else None
            if point is not None:
                found.setdefault(device, []).append(point)
    return found


def scaled(case: Case, share: int) -> Case | None:
    """The case with a share of its rows: each dimension of the first input's first size shrinks.

    None where that would leave next to nothing.
    """
    shape = case.inputs[0].shape
    rows = shape[0] // share if shape else 0
    if rows < 1:
        return None
    inputs = tuple(
        replace(i, shape=tuple(rows if d == shape[0] else d for d in i.shape)) for i in case.inputs
    )
    if sum(i.numel for i in inputs) < FEWEST:
        return None
    return replace(case, name=f"{case.name}/{share}", inputs=inputs, draw=None)


Measure = Callable[[Operator, Case], Point | None]


def sweep(operator: Operator, device: str, measure: Measure) -> Iterator[Point]:
    """The points of an operator: its bench cases; and around the crossover below the first of
    every dtype and of every word among its parameters."""
    swept: set[tuple[str, tuple[tuple[str, object], ...]]] = set()
    for case in operator.select("bench", device):
        kind = (case.dtype, dispatch.words_of(case.params))
        point = measure(operator, case)
        if point is not None:
            yield point
        if kind not in swept:
            swept.add(kind)
            yield from _down(operator, case, point, measure)


def _down(operator: Operator, case: Case, top: Point | None, measure: Measure) -> Iterator[Point]:
    before, at = top, 1
    for share in SHARES:
        smaller = scaled(case, share)
        point = measure(operator, smaller) if smaller else None
        if point is None:
            return
        yield point
        if before is not None and _choices(before) != _choices(point):
            middle = scaled(case, round((at * share) ** 0.5))
            between = measure(operator, middle) if middle else None
            if between is not None:
                yield between
        before, at = point, share


def _choices(point: Point) -> tuple[str, str]:
    return dispatch.best(point, False), dispatch.best(point, True) if point.backward else ""


def measured(
    names: Sequence[str] | None, device: str, *, quick: bool = True, say: Say = _silent
) -> Iterator[Point]:
    """Measure on this machine: the workbench checks, then times, every implementation but
    ``compile`` and ladders' steps, forward and backward. Raises :class:`WeftError` for a name that
    is not there, before anything runs."""
    from weft.workbench import bench

    chosen = [registry.operator(n) for n in names or registry.operator_names()]

    def measure(operator: Operator, case: Case) -> Point | None:
        ways = [i for i in registry.implementations(operator.name) if _counts(i)]
        one = replace(operator, cases=(replace(case, tags=frozenset({"bench"})),))
        more: dict[str, Any] = {"all_cases": True, "quick": quick, "on_event": say}
        return point_of(one, case, bench.run([one], ways, device=device, **more))

    for operator in chosen:
        yield from sweep(operator, device, measure)


def _counts(one: Implementation) -> bool:
    return not one.is_step and one.backend != "compile"


def write(path: Path, device: str, points: Iterable[Point], source: str) -> None:
    """Write a table, a point a line, so that whoever reads it finds a whole one. Raises
    :class:`WeftError` where it cannot be written."""
    ordered = sorted(points, key=lambda p: (p.operator, p.dtype, p.last, p.elements, p.case))
    head = {"format": dispatch.FORMAT, "device": device, "from": source}
    lines = ",\n".join(json.dumps(p.to_json(), separators=(",", ":")) for p in ordered)
    text = json.dumps(head)[:-1] + ', "points": [\n' + lines + "\n]}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        got = error.strerror or str(error)
        raise WeftError(f"the table could not be written to {path}", got=got) from error
    dispatch.forget()


def keep(device: str, points: Iterable[Point]) -> Path:
    """Put points into this machine's own table, over those of the same cases."""
    path = dispatch.own_table(device)
    known: Mapping[tuple[str, str], Point] = {}
    if path.exists():
        known = {(p.operator, p.case): p for p in dispatch.read(path)}
    new = {(p.operator, p.case): p for p in points}
    write(path, device, {**known, **new}.values(), "weft tune")
    return path


def rows(points: Iterable[Point]) -> list[dict[str, Any]]:
    """What each point says, for a reader: the choice for inference and for training, and the
    time beside the better of eager and torch."""
    found = []
    ordered = sorted(points, key=lambda p: (p.operator, p.dtype, p.last, p.elements))
    for p in ordered:
        row: dict[str, Any] = {"operator": p.operator, "case": p.case, "dtype": p.dtype}
        row |= {"elements": p.elements, "last": p.last}
        for word, grad in (("inference", False), ("training", True)):
            if grad and not p.backward:
                continue
            name = dispatch.best(p, grad)
            directions = (p.forward, p.backward) if grad else (p.forward,)
            base = [b for b in BASE if all(b in t for t in directions)]
            if not base or any(name not in t for t in directions):
                continue
            ours = sum(t[name][0] for t in directions)
            theirs = min(sum(t[b][0] for t in directions) for b in base)
            row[word] = {"choice": name, "us": round(ours, 3), "base_us": round(theirs, 3)}
        found.append(row)
    return found


def crossovers(operator: str | None = None) -> str:
    """Markdown: what the shipped tables choose, for the docs."""
    from weft.workbench.figures import table
    from weft.workbench.report.scales import NONE, time, times

    parts = []
    for path in sorted(dispatch.SHIPPED.glob("*.json")):
        points = [p for p in dispatch.read(path) if operator in (None, p.operator)]
        body = []
        for row in rows(points):
            cells = [row["operator"], f"`{row['case']}`"]
            for word in ("inference", "training"):
                one = row.get(word)
                gain = times(one["base_us"] / one["us"]) if one and one["us"] else NONE
                cells += [one["choice"], time(one["us"]), gain] if one else [NONE] * 3
            body.append(cells)
        head = ("operator", "case", "inference", "time", "gain", "training", "time", "gain")
        name = json.loads(path.read_text())["device"]
        parts.append(f"**{name}**\n\n{table(head, body, '   rr rr')}")
    return "\n".join(parts) or "No table is shipped yet.\n"
