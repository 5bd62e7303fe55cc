"""Markdown tables from the records under ``results/``, for README and docs. No figure is typed by hand.

``results/<device>/*.jsonl`` holds records; ``results/<device>/goals.json`` (optional) holds the goals set for
that device. A missed goal is shown as missed. cog calls these functions from the root of a checkout, so the
output must not depend on the day or on the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from weft.core.cases import is_tuned
from weft.core.errors import WeftError
from weft.core.implementation import BACKENDS
from weft.core.json_files import read_json
from weft.core.record import FAIL, UNSUPPORTED, Record
from weft.workbench.report.device_records import DeviceRecords, Row, by_device, load, mapping
from weft.workbench.report.ladders import ladders
from weft.workbench.report.scales import NONE, share, time, times, unit

RESULTS = Path("results")
MISSING = "No records are committed yet. `make bench` measures this machine."
RATE = "TFLOP/s"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Project goal for one case: the fastest of ``ours`` (implementations or backends) reaches ``at_least``.

    The value is a share of the limit, a share of the speed of the implementation ``of`` (``torch``,
    ``torch/flash``, ``compile``), or a number of ``TFLOP/s``. docs/contribute/figures.md shows all goals.
    """

    operator: str
    case: str
    ours: tuple[str, ...]
    at_least: float
    of: str = "limit"
    direction: str = "forward"
    readme: bool = True  # read from older goals.json files; the README shows no goals

    def __post_init__(self) -> None:
        if self.of not in ("limit", RATE, "compile") and self.of.partition("/")[0] != "torch":
            expected = f"limit, {RATE}, compile, torch or torch/..."
            raise WeftError("a goal's `of`", expected=expected, got=self.of)

    @property
    def text(self) -> str:
        if self.of == RATE:
            return f"≥ {self.at_least:g} {RATE}"
        return f"≥ {self.at_least * 100:g} % of {'the limit' if self.of == 'limit' else self.of}"

    def outcome(self, reached: float) -> str:
        value = f"{reached:.1f} {RATE}" if self.of == RATE else share(reached)
        return value if reached >= self.at_least else f"**missed: {value}**"


@dataclass(frozen=True, kw_only=True)
class MeasuredDevice:
    """Committed records and goals of one device."""

    records: DeviceRecords
    goals: tuple[Goal, ...]


def devices(results: Path = RESULTS, only: str | None = None) -> list[MeasuredDevice]:
    """Return all devices with committed records (of the operator ``only``): GPUs first, the latest first."""
    measured = []
    for folder in sorted(results.glob("*")):
        if folder.is_dir() and any(folder.rglob("*.jsonl")):
            measured += _devices_of_folder(folder, only)
    return sorted(measured, key=lambda m: (m.records.kind != "cuda", -m.records.latest, m.records.name))


@cache
def _records_of_folder(folder: Path) -> list[Record]:
    records, torn = load([folder])
    if torn:
        raise WeftError(f"{torn} torn lines in committed records", got=folder)
    # Cases that tuning made count for dispatch, whose page lists them; tables show an operator's own.
    return [r for r in records if not is_tuned(r.case)]


@cache
def _devices_of_folder(folder: Path, only: str | None) -> list[MeasuredDevice]:
    records = [r for r in _records_of_folder(folder) if only in (None, r.operator)]
    goals: tuple[Goal, ...] = ()
    file = folder / "goals.json"
    if file.exists():
        goals = tuple(Goal(**{**g, "ours": tuple(g["ours"])}) for g in read_json(file))
    return [MeasuredDevice(records=d, goals=goals) for d in by_device(records)]


def table(head: Iterable[str], rows: Iterable[Iterable[str]], align: str = "") -> str:
    """Return a Markdown table. ``align`` has ``r`` for a column of numbers and anything else for text."""
    names = list(head)
    rule = ["--:" if a == "r" else "---" for a in align.ljust(len(names))]
    lines = [names, rule, *rows]
    return "".join(f"| {' | '.join(_escaped(c) for c in line)} |\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def dates_and_commits(machines: Iterable[Mapping[str, Any]]) -> str:
    """Return the date and commit of one run, or the range of dates and the number of commits of several."""
    fingerprints = list(machines)
    dates = sorted({str(m.get("date") or "no date")[:10] for m in fingerprints})
    commits = sorted({str(m.get("commit") or "unknown")[:10] for m in fingerprints})
    if len(commits) > 1:  # an early record has no commit
        commits = [c for c in commits if c != "unknown"]
    dirty = " with uncommitted changes" if any(m.get("dirty") for m in fingerprints) else ""
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{days}, " + (f"commit {commits[0]}{dirty}" if len(commits) == 1 else f"{len(commits)} commits")


def caption(device: DeviceRecords) -> str:
    """Return device, dates, commits, versions and measured peak bandwidth as one sentence."""
    machine = device.machine
    versions = {k: v for k, v in mapping(machine.get("versions")).items() if v}
    facts = [f"**{device.name}**", dates_and_commits(device.machines)]
    facts += [f"driver {machine['driver']}"] if machine.get("driver") else []
    facts += [f"{k} {v}" for k, v in versions.items() if k in ("torch", "triton", "numba")]
    peaks = device.peaks
    if peaks.copy and not peaks.derived:
        read = f", read {unit(peaks.read, 'B/s')}" if peaks.read else ""
        facts.append(f"measured bandwidth: copy {unit(peaks.copy, 'B/s')}{read}")
    return ", ".join(facts) + "."


def best(rows: Iterable[Row]) -> Row | None:
    """Return the fastest row with a time that the timing checks did not flag as suspect."""
    timed = [r for r in rows if r.cold is not None and not r.suspect]
    return min(timed, key=lambda r: r.cold or 0, default=None)


def _case_cell(case: str, direction: str) -> str:
    return f"`{case}`" if direction == "forward" else f"`{case}` {direction}"


def everything(results: Path = RESULTS) -> str:
    """Return the fastest implementation at every case of every device: docs/contribute/figures.md."""
    measured = devices(results)
    parts = [f"## {m.records.name}\n\n{caption(m.records)}\n\n{_fastest(m.records)}" for m in measured]
    parts += [
        f"## {m.records.name}: goals\n\n{_goals_table(m.records, m.goals)}" for m in measured if m.goals
    ]
    return "\n".join(parts) if parts else MISSING + "\n"


def _fastest(device: DeviceRecords) -> str:
    head = ("operator", "case", "fastest", "time", "of limit", "speed-up", "torch")
    rows = []
    for (operator, case, direction), implementations in device.points.items():
        winner = best(implementations)
        if winner is None:
            continue
        torch = next((r for r in implementations if r.implementation == "torch"), None)
        numbers = [time(winner.cold), winner.share_of_limit, times(winner.speedup)]
        torch_time = time(torch.cold) if torch else NONE
        rows.append([operator, _case_cell(case, direction), winner.implementation, *numbers, torch_time])
    note = "Speed-up: against the faster of eager and compile.\n"
    return table(head, rows, "   rrrr") + "\n" + note if rows else "Nothing was timed here.\n"


def _goals_table(device: DeviceRecords, goals: Iterable[Goal]) -> str:
    """Return one row for each goal, beside the time of the implementation that the goal compares with."""
    head = ("operator", "case", "Weft", "time", "of limit", "baseline", "its time", "goal", "reached")
    rows = []
    for goal in goals:
        timed = device.points.get((goal.operator, goal.case, goal.direction), [])
        baseline_name = "torch" if goal.of in ("limit", RATE) else goal.of
        baseline = next((r for r in timed if r.implementation == baseline_name and r.timed), None)
        ours = best(r for r in timed if r.implementation in goal.ours or r.backend in goal.ours)
        reached = _reached(goal, ours, baseline)
        rows.append(
            [
                goal.operator,
                _case_cell(goal.case, goal.direction),
                ours.implementation if ours else " or ".join(goal.ours),
                time(ours.cold) if ours else NONE,
                ours.share_of_limit if ours else NONE,
                baseline_name if baseline else NONE,
                time(baseline.cold) if baseline else NONE,
                goal.text,
                "not measured" if reached is None else goal.outcome(reached),
            ]
        )
    return table(head, rows, "   rr r  ")


def _reached(goal: Goal, ours: Row | None, baseline: Row | None) -> float | None:
    if ours is None or ours.cold is None:
        return None
    if goal.of == "limit":
        return ours.efficiency
    if goal.of == RATE:
        return ours.tflops
    return baseline.cold / ours.cold if baseline and baseline.cold else None


def records_table(results: Path = RESULTS, prefix: str = "../../") -> str:
    """Return the list of record files: dates, commits and number of records; ``prefix`` leads to the root."""
    rows = []
    for file in sorted(results.glob("*/*.jsonl")):
        records, _ = load([file])
        machines = [mapping(r.machine) for r in records]
        commits = dict.fromkeys(
            str(m.get("commit") or "unknown")[:10] + (" (uncommitted changes)" if m.get("dirty") else "")
            for m in machines
        )
        dates = sorted({str(m.get("date") or "no date")[:10] for m in machines})
        name = f"[{file.parent.name}/{file.name}]({prefix}{file.as_posix()})"
        days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        rows.append([name, str(len(records)), days, ", ".join(commits)])
    return table(("file", "records", "measured", "commits"), rows, " r")


def operator(name: str, results: Path = RESULTS) -> str:
    """Return an operator's times for its README: all backends at every case, then its ladders."""
    parts = []
    for measured in devices(results, only=name):
        device = measured.records
        if name in device.operators:
            parts.append(
                f"{caption(device)}\n\n{_backends_table(device, name)}{_ladder_tables(device, name)}"
            )
    return "\n".join(parts) if parts else f"No records of `{name}` are committed yet.\n"


def memory(name: str, results: Path = RESULTS) -> str:
    """Return time and memory of forward plus backward, from the records of ``tools/head_memory.py``."""
    parts = []
    for file in sorted(results.glob(f"*/{name}-memory.json")):
        record = read_json(file)
        machine = record["machine"]
        head = (f"`{record['case']}`, both directions", "time", "memory beyond operands and gradients")
        rows = [
            (r["implementation"], time(r["ms"] * 1e3), f"{r['extra_bytes'] / 2**20:,.0f} MiB")
            for r in sorted(record["rows"], key=lambda r: r["ms"])
        ]
        line = (
            f"**{machine['device']}**, {dates_and_commits([machine])}, torch {machine['versions']['torch']}."
        )
        parts.append(f"{line}\n\n{table(head, rows, ' rr')}")
    return "\n".join(parts) if parts else MISSING + "\n"


def _backends_table(device: DeviceRecords, name: str) -> str:
    """Return times by case and backend, the fastest in bold; a cell without a time says why in a word."""
    rows = []
    for (operator_name, case, direction), timed in device.points.items():
        if operator_name != name or not any(r.timed for r in timed):
            continue
        winner = best(timed)
        cells = [
            _backend_cell([r for r in timed if r.backend == b and r.step is None], winner) for b in BACKENDS
        ]
        fastest = f"{winner.implementation}, {winner.share_of_limit}" if winner else NONE
        rows.append([_case_cell(case, direction), *cells, fastest])
    head = ("case", *BACKENDS, "fastest, of limit")
    return table(head, rows, " rrrrrr ") if rows else "Nothing was timed here.\n"


def _backend_cell(rows: list[Row], winner: Row | None) -> str:
    fastest = best(rows)
    if fastest is not None:
        text = time(fastest.cold)
        return f"**{text}**" if fastest is winner else text
    if any(r.timed for r in rows):
        return "suspect"
    words = {FAIL: "failed", UNSUPPORTED: "no"}
    return words.get(rows[0].status, "checked only") if rows else NONE


def _ladder_tables(device: DeviceRecords, name: str) -> str:
    """Return each ladder at its largest forward case: idea, time and gain of every step."""
    parts: list[str] = []
    shown_backends: set[str] = set()
    for ladder in ladders(device):
        if ladder.operator != name or ladder.backend in shown_backends:
            continue
        shown_backends.add(ladder.backend)
        rows: list[list[Any]] = []
        for step in ladder.steps:
            row = step.row
            numbers = [time(row.cold), times(step.gain), row.share_of_limit]
            rows.append([f"`{row.implementation}`", row.idea, *numbers])
        head = ("step", "idea", "time", "gain", "of limit")
        case = _case_cell(ladder.case, ladder.direction)
        parts.append(f"\nThe {ladder.backend} ladder at {case}:\n\n{table(head, rows, '  rrr')}")
    return "".join(parts)
