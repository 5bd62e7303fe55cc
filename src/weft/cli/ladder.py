"""``weft ladder``: show from records how each step of an operator's ladder changed the time, and why."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output
from weft.cli.options import Csv, Json
from weft.core.errors import WeftError

if TYPE_CHECKING:
    from weft.core.table import Table
    from weft.workbench.explain.ncu.report import Report
    from weft.workbench.report.device_records import Row
    from weft.workbench.report.ladders import Ladder

EPILOG = """Examples:
  weft ladder softmax results/nvidia-h200
  weft ladder sum sum.jsonl --case fp32-2^28
  weft ladder conv2d results/nvidia-h200 --csv > ladder.csv

Records: weft bench NAME --impl cuda --save FILE. Pictures: weft report PATH"""
BAR = 20  # characters of the fastest step's bar


def ladder(
    operator: Annotated[str, typer.Argument(metavar="NAME", help="Operator, such as matmul")],
    records: Annotated[
        list[Path],
        typer.Argument(metavar="PATH", help="Record files (JSON Lines), or folders of them"),
    ],
    case: Annotated[
        str | None, typer.Option("--case", metavar="NAME", help="Case [default: the one with the most bytes]")
    ] = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Show an operator's ladder from records: the idea, time and gain of each step, and what limits it.

    A gain is the time of the step before, divided by this step's. What limits a step comes from its
    counters, where the folder has them (weft profile --tool ncu). No kernel runs.

    Exit 0: shown; 2: invalid arguments, or records without a ladder of this operator.
    """
    from weft.core import registry

    output.only_one_format(json=as_json, csv=as_csv)
    with_ladder = [name for name in registry.operator_names() if _has_steps(name)]
    registry.entry(operator)
    if operator not in with_ladder:
        raise WeftError("an operator with a ladder", expected=" or ".join(with_ladder), got=operator)
    shown = _ladders(operator, records, case)
    reports = _counters(operator, records)
    if as_json:
        print(json.dumps({"ladders": [_to_json(device, one, reports) for device, one in shown]}))
    for number, (device, one) in enumerate(shown):
        table = _table(device, one, reports)
        if as_csv:
            output.print_csv(table)
        elif not as_json:
            output.console().print() if number else None
            output.show_table(table, options=("json", "csv"))
    count = ending.count_text(len(shown), "ladder")
    steps = sum(len(one.steps) for _, one in shown)
    ending.print_verdict(
        f"shown: {count} of {operator}, {ending.count_text(steps, 'step')}", to_stderr=as_json or as_csv
    )


def _has_steps(operator: str) -> bool:
    from weft.core import registry

    return any(re.search(r"/\d", name) for name in registry.implementation_names(operator))


def _ladders(operator: str, paths: Iterable[Path], case: str | None) -> list[tuple[str, Ladder]]:
    """Return one forward ladder for each device and backend: the one of ``case``, or of the largest case."""
    from weft.workbench.report.device_records import by_device, load
    from weft.workbench.report.ladders import ladders

    loaded, torn = load(paths)
    if torn:
        output.log(f"{ending.count_text(torn, 'torn line')} skipped")
    all_cases: set[str] = set()
    chosen: dict[tuple[str, str], tuple[str, Ladder]] = {}
    for device in by_device(r for r in loaded if r.operator == operator):
        for one in ladders(device):
            all_cases.add(one.case)
            if case in (None, one.case):
                whole = _with_last_step(device.points[operator, one.case, one.direction], one)
                chosen.setdefault((device.name, one.backend), (device.name, whole))
    if not chosen:
        raise WeftError(
            f"no ladder of {operator}" + (f" at {case}" if case else ""),
            expected="at least two timed steps, such as cuda/01-naive and cuda/02-coalesced"
            + (f", at one of: {', '.join(sorted(all_cases))}" if all_cases else ""),
            got=f"{ending.count_text(len(loaded), 'record')} in {', '.join(map(str, paths))}",
            hint=f"weft bench {operator} --impl cuda --save FILE; weft ops {operator} lists the steps",
        )
    return list(chosen.values())


def _with_last_step(rows: Iterable[Row], ladder: Ladder) -> Ladder:
    """Add the implementation that the ladder leads to (``cuda`` after ``cuda/09-...``), if it was timed."""
    from weft.workbench.report.ladders import Step

    last = next((r for r in rows if r.implementation == ladder.backend and r.cold), None)
    before = next((s.row.cold for s in reversed(ladder.steps) if s.row.cold), None)
    if last is None or last.cold is None or before is None:
        return ladder
    return replace(ladder, steps=(*ladder.steps, Step(row=last, gain=before / last.cold)))


def _counters(operator: str, paths: Iterable[Path]) -> dict[tuple[str, str], Report]:
    """Return Nsight Compute's forward reports in these folders, by implementation and case."""
    from weft.workbench.explain.ncu.report import FORMAT, Report

    reports = {}
    for folder in (p for p in paths if p.is_dir()):
        for file in sorted(folder.glob("*.ndjson")):
            for line in file.read_text().splitlines():
                try:
                    data = json.loads(line)
                except ValueError:
                    continue  # another program's file: only a line that says it is a report is read as one
                if isinstance(data, dict) and data.get("format") == FORMAT:
                    report = Report.from_json(data)
                    if (report.operator, report.direction) == (operator, "forward"):
                        reports[report.implementation, report.case] = report
    return reports


def _table(device: str, ladder: Ladder, reports: Mapping[tuple[str, str], Report]) -> Table:
    from weft.core.table import ESSENTIAL, Column, Number, Table
    from weft.workbench.report.table import duration

    times = [step.row.cold for step in ladder.steps if step.row.cold]
    rows = []
    notes = [
        f"{step.row.implementation}: {why}"
        for step in ladder.steps
        if (why := _limit(ladder, step.row.implementation, reports))
    ]
    for step in ladder.steps:
        row, gain = step.row, step.gain
        rows.append(
            [
                row.implementation,
                duration(row.cold),
                Number(f"{gain:.2f}x", gain) if gain else Number("", None),
                Number(row.share_of_limit, row.efficiency),
                "█" * max(1, round(BAR * min(times) / row.cold)) if row.cold else row.status,
                row.idea,
            ]
        )
    if ladder.peer and ladder.peer.cold:
        peer = ladder.peer
        cells = [duration(peer.cold), Number("", None), Number(peer.share_of_limit, peer.efficiency), ""]
        rows.append([peer.implementation, *cells, "torch's own choice, for comparison"])
    columns = (
        Column("step"),
        Column("time", numeric=True, unit="us"),
        Column("gain", numeric=True),
        Column("of limit", numeric=True),
        Column("speed", priority=2),
        Column("idea", priority=ESSENTIAL, fold=24),
    )
    return Table(
        columns=columns,
        rows=rows,
        title=f"{ladder.operator}  {ladder.case}  {ladder.direction}  {device}",
        notes=[ladder.summary, *notes],
    )


def _limit(ladder: Ladder, implementation: str, reports: Mapping[tuple[str, str], Report]) -> str:
    """Return what the step's counters say limits it; empty without counters of this case."""
    report = reports.get((implementation, ladder.case))
    return report.bottleneck.sentence if report else ""


def _to_json(device: str, ladder: Ladder, reports: Mapping[tuple[str, str], Report]) -> dict[str, Any]:
    steps = [
        {
            "implementation": step.row.implementation,
            "idea": step.row.idea,
            "us": step.row.cold,
            "gain": step.gain,
            "share_of_limit": step.row.efficiency,
            "limited_by": _limit(ladder, step.row.implementation, reports) or None,
        }
        for step in ladder.steps
    ]
    return {
        "operator": ladder.operator,
        "backend": ladder.backend,
        "case": ladder.case,
        "direction": ladder.direction,
        "device": device,
        "steps": steps,
        "torch_us": ladder.peer.cold if ladder.peer else None,
    }
