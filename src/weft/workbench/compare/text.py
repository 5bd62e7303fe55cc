"""Text of a comparison: cells of the table, notes, one JSON object, and Markdown for a pull request.

Changes come first, unchanged points are folded, and every ``ambiguous`` has its reason. Names come from
records, which can be anyone's, so they are escaped in Markdown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core import Record
from weft.core.table import Column, Number, Table, group_notes
from weft.workbench.compare import verdict as rules
from weft.workbench.compare.noise import Noise, machine_key, path_for
from weft.workbench.compare.sides import MIN_POOLED_RUNS, commits, differences
from weft.workbench.compare.verdict import AMBIGUOUS, FASTER, NOT_COMPARED, SAME, SLOWER, Comparison
from weft.workbench.records import busy_reason
from weft.workbench.report.table import duration

COLUMNS = ("operator", "implementation", "case", "direction", "A", "B", "B / A", "noise", "verdict")
STYLES = {FASTER: "green", SLOWER: "bold red", AMBIGUOUS: "yellow", SAME: ""}  # of a row on a terminal
SHOWN_POINTS = 2  # points that a note names; more are counted
# Words on screen. JSON output and --fail-on use the verdicts' own names.
SHOWN = {AMBIGUOUS: "inconclusive", NOT_COMPARED: "not measured"}
NOISE_SOURCES = {
    "default": "the default for this kind of device",
    "measured": "measured on this machine",
    "threshold": "the threshold",
    "drift": "drift within a run",
    "runs": "the distance between runs of one commit",
    "busy": "of a machine that other processes use",
}
REMEASURE = (
    "To decide an inconclusive result, measure both commits again on a quiet machine and append to the "
    f"same records, in alternation: {MIN_POOLED_RUNS} or more runs of each commit are pooled into a "
    "narrower interval. If so small a difference does not matter, raise the threshold."
)


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """Input of all texts: the records of both sides and what was made of them.

    ``failed`` are the comparisons that fail the gate. ``noise_file`` is the file that the user named;
    it is empty if the noise comes from the cache folder.
    """

    baseline: Sequence[Record]
    candidate: Sequence[Record]
    comparisons: Sequence[Comparison]
    failed: Sequence[Comparison]
    noises: rules.NoiseByMachine
    threshold: float | None
    fail_on: str
    noise_file: str = ""

    @property
    def sides(self) -> tuple[tuple[str, Sequence[Record]], ...]:
        """Name and records of both sides."""
        return ("A", self.baseline), ("B", self.candidate)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as one JSON object."""
        return {
            "counts": rules.counts(self.comparisons),
            "differences": differences(self.baseline, self.candidate),
            "comparisons": [c.to_json() for c in self.comparisons],
            "commits": {name.lower(): [c.to_json() for c in commits(r)] for name, r in self.sides},
            "machine": machines(self),
            "noise": noise_sources(self),
            "threshold": self.threshold,
            "visible": rules.visible_difference(self.threshold),
            "fail_on": self.fail_on,
            "failed": bool(self.failed),
        }


def machines(report: ComparisonReport) -> str:
    """Return the names of the machines that were measured."""
    return rules.machine_names({rules.machine_of(r) for r in (*report.baseline, *report.candidate)})


def noise_sources(report: ComparisonReport) -> list[dict[str, Any]]:
    """Return the noise of each machine: "measured" or "default", its share, and where it was measured."""
    by_key = {machine_key(r.machine): r.machine for r in (*report.baseline, *report.candidate)}
    return [_noise_source(report, machine, report.noises.get(key)) for key, machine in by_key.items()]


def _noise_source(
    report: ComparisonReport, machine: Mapping[str, Any], measured: Noise | None
) -> dict[str, Any]:
    if measured is None:
        share = rules.default_noise(machine)
        empty = dict.fromkeys(("date", "commit", "runs", "path"))
        return {"machine": machine.get("device"), "origin": "default", "share": share, **empty}
    return {
        "machine": machine.get("device"),
        "origin": "measured",
        "share": measured.usual,
        "date": measured.machine.get("date"),
        "commit": measured.machine.get("commit"),
        "runs": measured.runs,
        "path": report.noise_file or path_for(machine).name,
    }


def noise_notes(report: ComparisonReport) -> list[str]:
    """Return one sentence about the noise of each machine, and one about the threshold."""
    notes = []
    for source in noise_sources(report):
        share = f"{source['share']:.1%}"
        if source["origin"] == "measured":
            date, commit = str(source["date"])[:10], str(source["commit"])[:12]
            details = f"{source['runs']} runs, {date}, commit {commit}"
            notes.append(f"A/A noise of {source['machine']}: {share}, measured ({details})")
        elif report.threshold is None:
            hint = "not measured here: weft compare --measure-noise"
            notes.append(f"noise of {source['machine']}: {share}, the default ({hint})")
    if report.threshold is not None:
        notes.append(f"threshold: {report.threshold:.1%}")
    for name, records in report.sides:
        if reason := busy_reason(records):
            notes.append(f"the machine was busy during {name} ({reason}): its times are doubtful")
    return notes


def side_rows(report: ComparisonReport) -> list[tuple[str, str, str, str]]:
    """Return for A and B: name, commits, dates, and number of records."""
    rows = []
    for name, records in report.sides:
        known = commits(records)
        # ISO dates compare as text; 16 characters are the date and the minute.
        dates = list(dict.fromkeys(d[:16].replace("T", " ") for c in known for d in (c.first, c.last)))
        period = f"{min(dates)} to {max(dates)}" if len(dates) > 1 else dates[0]
        rows.append((name, ", ".join(c.short for c in known), period, str(len(records))))
    return rows


def counts_line(comparisons: Sequence[Comparison]) -> str:
    """Return the number of each verdict in words: ``10 same, 5 inconclusive, 23 not measured``."""
    counts = rules.counts(comparisons)
    return ", ".join(f"{n} {SHOWN.get(verdict, verdict)}" for verdict, n in counts.items() if n)


def summary(report: ComparisonReport) -> str:
    """Return the result in one sentence: the counts and the largest slowdown."""
    counts = rules.counts(report.comparisons)
    compared = sum(counts[v] for v in (FASTER, SLOWER, SAME, AMBIGUOUS))
    order = (SLOWER, "broken", FASTER, AMBIGUOUS, SAME)
    parts = [f"{counts[v]} {SHOWN.get(v, v)}" for v in order if counts[v]]
    text = f"{', '.join(parts) or 'nothing to compare'} of {compared} compared"
    worst = max((c for c in report.comparisons if c.verdict == SLOWER), key=_ratio, default=None)
    if worst is not None:
        point = f"{worst.operator} {worst.implementation}, {worst.case}, {worst.direction}"
        text += f"; the largest slowdown takes {_ratio(worst):.2f} times as long ({point})"
    return text + "."


def _ratio(c: Comparison) -> float:
    return c.ratio or 0.0


def cells(c: Comparison) -> list[str]:
    """Return one comparison as a row of the table, by ``COLUMNS``."""
    point = [c.operator, c.implementation, c.case, c.direction]
    if c.verdict is None or c.ratio is None or c.interval is None or c.noise is None:
        verdict = f"broken: {c.reason}" if c.broken else c.reason
        return [*point, duration(c.a), duration(c.b), "", "", verdict]
    low, high = c.interval
    ratio = f"{c.ratio:.3f} ({low:.3f} to {high:.3f})"
    shown = SHOWN.get(c.verdict, c.verdict)
    verdict = f"{shown}: {c.reason}" if c.reason else shown
    return [*point, duration(c.a), duration(c.b), ratio, f"{c.noise:.1%} {c.noise_from}", verdict]


def changed_and_unchanged(
    comparisons: Sequence[Comparison],
) -> tuple[list[Comparison], list[Comparison]]:
    """Return the points that changed or may have changed, the worst first, and the other points."""

    def rank(c: Comparison) -> tuple[int, float]:
        # Broken points have no verdict, and come right after the slower ones.
        group = {SLOWER: 0, None: 1 if c.broken else 4, FASTER: 2, AMBIGUOUS: 3}[c.verdict]
        # Slower: the largest ratio first; faster: the smallest.
        return group, -_ratio(c) if c.verdict != FASTER else _ratio(c)

    changed = [c for c in comparisons if c.verdict in (SLOWER, FASTER, AMBIGUOUS) or c.broken]
    return sorted(changed, key=rank), [c for c in comparisons if c not in changed]


def terminal_table(comparisons: Sequence[Comparison], everything: bool = False) -> Table:
    """Return a row for each point that changed or may have changed, with the reasons as notes.

    The other points are counted in the notes, or with ``everything`` have rows as well. What is the same in
    all rows is in the title.
    """
    changed, unchanged = changed_and_unchanged(comparisons)
    table = full_table([*changed, *unchanged] if everything else changed)
    constant = {
        i: table.rows[0][i]
        for i, column in enumerate(table.columns)
        if column.name in ("operator", "case", "direction")
        and len(table.rows) > 1
        and len({row[i] for row in table.rows}) == 1
    }
    shown = [i for i, column in enumerate(table.columns) if i not in constant and column.name != "reason"]
    notes = _reasons(changed)
    notes += _reasons(unchanged) if everything else _unchanged_notes(unchanged)
    return Table(
        columns=[table.columns[i] for i in shown] if table.rows else (),
        rows=[[row[i] for i in shown] for row in table.rows],
        title="  ".join(constant.values()) if table.rows else "No point has changed.",
        notes=notes,
        styles=table.styles,
    )


def full_table(comparisons: Sequence[Comparison]) -> Table:
    """Return a row for each comparison with all columns, as CSV has them."""
    columns = (
        *(Column(name) for name in ("operator", "implementation", "case", "direction", "verdict")),
        Column("B / A", numeric=True),
        Column("A", 1, numeric=True, unit="us"),
        Column("B", 1, numeric=True, unit="us"),
        Column("from", 2, numeric=True),
        Column("to", 2, numeric=True),
        Column("noise", 3, numeric=True, unit="%"),
        Column("noise from", 4),
        Column("reason", 5, fold=20),
    )
    styles = ["red" if c.broken else "dim" if c.verdict is None else STYLES[c.verdict] for c in comparisons]
    return Table(columns, [_row(c) for c in comparisons], styles=styles)


def _row(c: Comparison) -> tuple[str, ...]:
    low, high = c.interval or (None, None)
    percent = None if c.noise is None else 100 * c.noise
    return (
        *(c.operator, c.implementation, c.case, c.direction, _shown(c)),
        _ratio_cell(c.ratio),
        duration(c.a),
        duration(c.b),
        _ratio_cell(low),
        _ratio_cell(high),
        Number("" if percent is None else f"{percent:.1f} %", percent),
        c.noise_from,
        c.reason,
    )


def _ratio_cell(ratio: float | None) -> Number:
    return Number("" if ratio is None else f"{ratio:.3f}", ratio)


def _shown(c: Comparison) -> str:
    """Return the verdict in one word on screen."""
    verdict = "broken" if c.broken else c.verdict or NOT_COMPARED
    return SHOWN.get(verdict, verdict)


def _reasons(comparisons: Sequence[Comparison]) -> list[str]:
    """Return each reason once with its points; those that differ only in names and numbers are one."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for c in comparisons:
        if c.reason:
            # The implementation's own name would make each reason another one.
            reason = c.reason.replace(f": {c.implementation} ", ": ")
            groups.setdefault((_shown(c), reason), []).append(c)
    notes = []
    for verdict in dict.fromkeys(shown for shown, _ in groups):
        reasons = [reason for shown, reason in groups if shown == verdict]
        for text, originals in group_notes(reasons).items():
            points = [c for original in originals for c in groups[verdict, original]]
            names = [f"{c.operator} {c.implementation} {c.case} {c.direction}" for c in points]
            subject = ", ".join(names) if len(names) <= SHOWN_POINTS else f"{len(names)} points"
            notes.append(f"{verdict}: {text} ({subject})")
    return notes


def _unchanged_notes(unchanged: Sequence[Comparison]) -> list[str]:
    """Return the number of the same points with their largest difference, and of those without a verdict."""
    same = [c for c in unchanged if c.verdict == SAME]
    notes = []
    if same:
        largest = max(abs(_ratio(c) - 1) for c in same)
        notes.append(f"same: {len(same)} point{'s'[: len(same) != 1]}, differences up to {largest:.1%}")
    notes += _reasons([c for c in unchanged if c.verdict is None])
    return [*notes, "--all lists these points as well"] if unchanged else []


def _escape(text: str) -> str:
    """Escape text so that Markdown, HTML and mentions in it have no effect."""
    # The ampersand comes first, or it would escape the entities of the others.
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("@", "&#64;")):
        text = text.replace(character, entity)
    for character in "\\|`*_[]":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())  # a line break would end the row of a table


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = "| " + " | ".join("---" for _ in columns) + " |"
    lines = ["| " + " | ".join(map(_escape, row)) + " |" for row in (columns, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])


def markdown(report: ComparisonReport) -> str:
    """Return Markdown for a pull request: heading, summary, sides, changes, and the rest folded."""
    changed, unchanged = changed_and_unchanged(report.comparisons)
    outcome = "stopped" if report.failed else "passed"
    parts = [
        f"### Speed, {outcome}: {_escape(machines(report))}",
        _escape(summary(report)),
        _table(("side", "commit", "measured", "records"), side_rows(report)),
        f"Versions: {_escape(_versions(report.candidate))}.",
    ]
    parts += [f"Differs: {_escape(note)}." for note in differences(report.baseline, report.candidate)]
    if changed:
        parts.append(_table(COLUMNS, [cells(c) for c in changed]))
    if any(c.verdict == AMBIGUOUS for c in changed):
        parts.append(REMEASURE)
    if unchanged:
        same = sum(c.verdict == SAME for c in unchanged)
        others = f", {len(unchanged) - same} not compared" if len(unchanged) > same else ""
        summary_line = f"<details><summary>{same} unchanged{others}</summary>"
        parts += [summary_line, _table(COLUMNS, [cells(c) for c in unchanged]), "</details>"]
    parts += [f"{_escape(note)}." for note in noise_notes(report)]
    used = {c.noise_from for c in report.comparisons if c.noise_from}
    if used:
        sources = "; ".join(f"{source} is {text}" for source, text in NOISE_SOURCES.items() if source in used)
        parts.append(f"Time is the cold median. Noise: {sources}.")
    return "\n\n".join(parts)


def _versions(records: Sequence[Record]) -> str:
    machine = records[-1].machine
    versions = {"driver": machine.get("driver"), **(machine.get("versions") or {})}
    return ", ".join(f"{k} {v}" for k, v in versions.items() if v) or "unknown"
