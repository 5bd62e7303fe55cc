"""Markdown tables from the records under ``results/``, for README and docs: no figure is typed.

``results/<device>/*.jsonl`` are records, ``results/<device>/goals.json`` (optional) what was aimed
at there; a goal that was missed is shown as it is. Called by cog from the root of a checkout, so
nothing here may depend on the day or the machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError
from weft.core.implementation import BACKENDS
from weft.core.record import FAIL, UNSUPPORTED
from weft.workbench.report.devices import DeviceRecords, by_device
from weft.workbench.report.files import load
from weft.workbench.report.ladders import ladders
from weft.workbench.report.rows import Row, mapping
from weft.workbench.report.scales import NONE, share, time, times, unit

RESULTS = Path("results")
MISSING = "No records are committed yet. `make bench` measures this machine in under a minute."


def slug(device: str) -> str:
    """A device's name as a folder's: ``Some GPU (40 GB)`` is ``some-gpu-40-gb``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unknown"


RATE = "TFLOP/s"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What was aimed at: the best of ``ours`` reaches ``at_least`` of the limit, or of the speed of
    the implementation ``of`` (``torch``, ``torch/flash``, ``compile``), or as many ``TFLOP/s``.
    ``ours`` are names of implementations or of backends. ``readme``: whether the README shows it;
    docs/figures.md shows all."""

    operator: str
    case: str
    ours: tuple[str, ...]
    at_least: float
    of: str = "limit"
    direction: str = "forward"
    readme: bool = True

    def __post_init__(self) -> None:
        if self.of not in ("limit", RATE, "compile") and self.of.partition("/")[0] != "torch":
            expected = f"limit, {RATE}, compile, torch or torch/..."
            raise WeftError("a goal's `of`", expected=expected, got=self.of)

    @property
    def aim(self) -> str:
        """In words."""
        if self.of == RATE:
            return f"≥ {self.at_least:g} {RATE}"
        return f"≥ {self.at_least * 100:g} % of {'the limit' if self.of == 'limit' else self.of}"

    def outcome(self, reached: float) -> str:
        """Whether it was met, and by what."""
        told = f"{reached:.1f} {RATE}" if self.of == RATE else share(reached)
        return f"met: {told}" if reached >= self.at_least else f"**missed: {told}**"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One device's committed records and goals."""

    records: DeviceRecords
    goals: tuple[Goal, ...]


def devices(results: Path = RESULTS, only: str | None = None) -> list[Measured]:
    """All devices with committed records (of one operator), GPUs first, then by name."""
    found = []
    for folder in sorted(results.glob("*")):
        if folder.is_dir() and any(folder.rglob("*.jsonl")):
            found += _measured(folder, only)
    return sorted(found, key=lambda m: (m.records.kind != "cuda", m.records.name))


@cache
def _measured(folder: Path, only: str | None) -> list[Measured]:
    records, torn = load([folder])
    records = [r for r in records if only in (None, r.operator)]
    if torn:
        raise WeftError(f"{torn} torn lines in committed records", got=folder)
    goals: tuple[Goal, ...] = ()
    file = folder / "goals.json"
    if file.exists():
        goals = tuple(Goal(**{**g, "ours": tuple(g["ours"])}) for g in json.loads(file.read_text()))
    return [Measured(records=d, goals=goals) for d in by_device(records)]


def table(head: Iterable[str], rows: Iterable[Iterable[str]], align: str = "") -> str:
    """A Markdown table; ``align`` has ``r`` for each column of numbers, anything else for text."""
    names = list(head)
    rule = ["--:" if a == "r" else "---" for a in align.ljust(len(names))]
    lines = [names, rule, *rows]
    return "".join(f"| {' | '.join(_cell(c) for c in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def caption(device: DeviceRecords) -> str:
    """Device, date, commit and versions: what a figure means nothing without."""
    machine = device.machine
    commits = dict.fromkeys(str(m.get("commit") or "unknown")[:10] for m in device.machines)
    dirty = " with uncommitted changes" if any(m.get("dirty") for m in device.machines) else ""
    versions = {k: v for k, v in mapping(machine.get("versions")).items() if v}
    told = [f"**{device.name}**", str(machine.get("date") or "no date")[:10]]
    told.append(f"commit {' and '.join(commits)}{dirty}")
    told += [f"driver {machine['driver']}"] if machine.get("driver") else []
    told += [f"{k} {v}" for k, v in versions.items() if k in ("weft", "torch", "triton", "numba")]
    roofs = device.roofs
    if roofs.copy and not roofs.derived:
        read = f", read {unit(roofs.read, 'B/s')}" if roofs.read else ""
        told.append(f"measured ceilings: copy {unit(roofs.copy, 'B/s')}{read}")
    return ", ".join(told) + "."


def readme(results: Path = RESULTS) -> str:
    """The README's figures: by goal where goals are set, else each case's fastest way."""
    found = devices(results)
    shown = [m for m in found if m.records.kind == "cuda"] or found
    if not shown:
        return MISSING + "\n"
    parts = []
    for one in shown:
        goals = [g for g in one.goals if g.readme]
        body = _by_goal(one, goals) if goals else _fastest(one.records, forward_only=True)
        parts.append(f"{caption(one.records)}\n\n{body}")
    return "\n".join(parts)


def _by_goal(measured: Measured, goals: Iterable[Goal]) -> str:
    head = ("operator", "case", "ours", "time", "of the limit", "torch", "aimed at", "")
    points = measured.records.points
    rows = []
    for goal in goals:
        here = points.get((goal.operator, goal.case, goal.direction), [])
        other = "torch" if goal.of in ("limit", RATE) else goal.of
        torch = next((r for r in here if r.implementation == other and r.timed), None)
        best = _best(r for r in here if _named(r, goal.ours))
        reached = _reached(goal, best, torch)
        outcome = "not measured" if reached is None else goal.outcome(reached)
        name = goal.case if goal.direction == "forward" else f"{goal.case} {goal.direction}"
        ours = best.implementation if best else " or ".join(goal.ours)
        figures = [time(best.cold), share(best.efficiency)] if best else [NONE, NONE]
        theirs = f"{time(torch.cold)}, {share(torch.efficiency)}" if torch else NONE
        rows.append([goal.operator, f"`{name}`", ours, *figures, theirs, goal.aim, outcome])
    return table(head, rows, "   rrr")


def _named(row: Row, names: tuple[str, ...]) -> bool:
    return row.implementation in names or row.backend in names


def _best(rows: Iterable[Row]) -> Row | None:
    timed = [r for r in rows if r.cold is not None and not r.suspect]
    return min(timed, key=lambda r: r.cold or 0, default=None)


def _reached(goal: Goal, best: Row | None, torch: Row | None) -> float | None:
    if best is None or best.cold is None:
        return None
    if goal.of == "limit":
        return best.efficiency
    if goal.of == RATE:
        return best.tflops
    return torch.cold / best.cold if torch and torch.cold else None


def _fastest(device: DeviceRecords, forward_only: bool = False) -> str:
    head = ("operator", "case", "fastest", "time", "of the limit", "speed-up", "torch")
    rows = []
    for (operator, case, direction), here in device.points.items():
        best = _best(here)
        if best is None or (forward_only and direction != "forward"):
            continue
        torch = next((r for r in here if r.implementation == "torch"), None)
        name = f"`{case}`" if direction == "forward" else f"`{case}` {direction}"
        figures = [time(best.cold), share(best.efficiency), times(best.speedup)]
        theirs = time(torch.cold) if torch else NONE
        rows.append([operator, name, best.implementation, *figures, theirs])
    note = "Speed-up: over the better of eager and compile.\n"
    return table(head, rows, "   rrrr") + "\n" + note if rows else "Nothing was timed here.\n"


def everything(results: Path = RESULTS) -> str:
    """Every device's fastest way at every case, both directions: ``docs/figures.md``."""
    found = devices(results)
    parts = [f"## {m.records.name}\n\n{caption(m.records)}\n\n{_fastest(m.records)}" for m in found]
    aimed = (
        f"## {m.records.name}: what was aimed at\n\n{_by_goal(m, m.goals)}"
        for m in found
        if m.goals
    )
    return "\n".join([*parts, *aimed]) if parts else MISSING + "\n"


def operator(name: str, results: Path = RESULTS) -> str:
    """An operator's figures for its README: six ways at every case, then its ladders."""
    parts = []
    for one in devices(results, only=name):
        device = one.records
        if name in device.operators:
            parts.append(f"{caption(device)}\n\n{_six_ways(device, name)}{_ladders(device, name)}")
    return "\n".join(parts) if parts else f"No records of `{name}` are committed yet.\n"


def memory(name: str, results: Path = RESULTS) -> str:
    """What an operator takes beyond its operands, forward and backward together, by the records
    of ``tools/head_memory.py``."""
    parts = []
    for file in sorted(results.glob(f"*/{name}-memory.json")):
        told = json.loads(file.read_text())
        here = told["machine"]
        head = (
            f"`{told['case']}`, both directions",
            "time",
            "memory beyond operands and gradients",
        )
        rows = [
            (r["implementation"], time(r["ms"] * 1e3), f"{r['extra_bytes'] / 2**20:,.0f} MiB")
            for r in sorted(told["rows"], key=lambda r: r["ms"])
        ]
        date, commit = str(here["date"])[:10], str(here["commit"])[:10]
        told_of = (
            f"**{here['device']}**, {date}, commit {commit}, torch {here['versions']['torch']}."
        )
        parts.append(f"{told_of}\n\n{table(head, rows, ' rr')}")
    return "\n".join(parts) if parts else MISSING + "\n"


def _six_ways(device: DeviceRecords, name: str) -> str:
    """Times by case and backend, the fastest bold; a cell with no time says why in a word."""
    rows = []
    for (operator_name, case, direction), here in device.points.items():
        if operator_name != name or not any(r.timed for r in here):
            continue
        best = _best(here)
        cells = [
            _way([r for r in here if r.backend == b and r.step is None], best) for b in BACKENDS
        ]
        told = f"`{case}`" if direction == "forward" else f"`{case}` {direction}"
        reached = f"{best.implementation}, {share(best.efficiency)}" if best else NONE
        rows.append([told, *cells, reached])
    head = ("case", *BACKENDS, "fastest, of the limit")
    return table(head, rows, " rrrrrr ") if rows else "Nothing was timed here.\n"


def _way(rows: list[Row], best: Row | None) -> str:
    found = _best(rows)
    if found is not None:
        text = time(found.cold)
        return f"**{text}**" if found is best else text
    if any(r.timed for r in rows):
        return "suspect"
    words = {FAIL: "failed", UNSUPPORTED: "no"}
    return words.get(rows[0].status, "checked only") if rows else NONE


def _ladders(device: DeviceRecords, name: str) -> str:
    """Each ladder at its largest forward case: the idea, the time and the gain of every step."""
    parts: list[str] = []
    seen: set[str] = set()
    for ladder in ladders(device):
        if ladder.operator != name or ladder.backend in seen:
            continue
        seen.add(ladder.backend)
        rows: list[list[Any]] = []
        for step in ladder.steps:
            row = step.row
            figures = [time(row.cold), times(step.gain), share(row.efficiency)]
            rows.append([f"`{row.implementation}`", row.idea, *figures])
        head = ("step", "idea", "time", "gain", "of the limit")
        told = f"`{ladder.case}`" if ladder.direction == "forward" else f"`{ladder.case}` backward"
        parts.append(f"\nThe {ladder.backend} ladder at {told}:\n\n{table(head, rows, '  rrr')}")
    return "".join(parts)
