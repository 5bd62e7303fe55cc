"""``weft bench``: check implementations, time those that pass, and compare them with the limit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output, progress
from weft.cli.busy import log_doubts, warn_if_busy
from weft.cli.options import (
    MEMORY,
    SECONDS,
    Case,
    Csv,
    Device,
    Files,
    Impl,
    Json,
    Memory,
    Names,
    Seconds,
    limits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from weft.core import Record

EPILOG = """Examples:
  weft bench
  weft bench softmax --with mine.py --save records.jsonl
  weft bench gelu sum --impl torch --impl compile --quick

Meaning and limits of each number: weft help time"""
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="Time batch-invariant variants too, beside their implementations; price is the ratio",
    ),
]
PATIENCE = 30.0  # seconds after which the default set starts no further backward


def bench(
    operators: Annotated[
        Names,
        typer.Argument(metavar="OPERATOR", help="Operators [default: gelu, softmax, sum and matmul]"),
    ] = None,
    impl: Impl = None,
    case: Case = None,
    direction: Annotated[
        Names,
        typer.Option(metavar="forward|backward", help="Direction to run (repeatable) [default: both]"),
    ] = None,
    device: Device = None,
    all_cases: Annotated[
        bool, typer.Option("--all-cases", help="Run every bench case instead of each operator's first")
    ] = False,
    batch_invariant: BatchInvariant = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append the records to this JSON Lines file")
    ] = None,
    as_json: Json = False,
    as_csv: Csv = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure for less time, with wider confidence intervals")
    ] = False,
    files: Files = None,
    seconds: Seconds = SECONDS,
    memory: Memory = MEMORY,
) -> None:
    """Check each implementation, then time those that pass, side by side.

    Without arguments: gelu, softmax, sum and matmul at their first case, one implementation for each
    backend, forward, and backward if time allows; this takes less than a minute. With --all-cases
    alone: every case of every operator.

    Exit 0: everything passed; 1: something failed, is suspect or could not be timed; 2: invalid
    arguments.
    """
    output.only_one_format(json=as_json, csv=as_csv)
    from weft.core import registry
    from weft.workbench.bench import went_against
    from weft.workbench.sandbox.candidates import ExternalCandidates, UnreadableFile

    restricted = bool(operators or case or direction or all_cases)
    if not (operators or case or all_cases or files):
        operators = list(registry.FIRST_LOOK)
    names = {"operators": operators, "impls": impl, "cases": case, "directions": direction}
    options = {
        "all_cases": all_cases,
        "batch_invariant": batch_invariant,
        "quick": quick,
        "patience": None if restricted else PATIENCE,
        "first_look": not (restricted or impl or files),
    }
    watch, records = ending.Stopwatch(), []
    try:
        with (
            ExternalCandidates(files or [], limits(seconds, memory)) as candidates,
            progress.stoppable() as stop,
        ):
            for record in _run(device, save, as_json or as_csv, candidates.bench_arguments(names) | options):
                records.append(record)
    except UnreadableFile as error:
        output.log(f"failed: {error}")
        raise typer.Exit(1) from error
    from weft.workbench.report import table

    if as_json:
        shown = [r.to_json() for r in records]
        print(json.dumps({**stop.to_json(), "records": shown} if stop else shown))
    elif as_csv:
        output.print_csv(table.csv_table(records))
    elif records:
        output.show_notes(table.footnote(records).splitlines())
    log_doubts(records)
    own_code = not files
    line = _verdict_line(records, watch, stop, save, own_code)
    ending.print_verdict(line, to_stderr=as_json or as_csv)
    if stop or went_against(records, own_code=own_code):
        raise typer.Exit(stop.exit_code or 1)


def _verdict_line(
    records: Sequence[Record],
    watch: ending.Stopwatch,
    stop: progress.StopRequest,
    save: Path | None,
    own_code: bool,
) -> str:
    """Return the last line: counts, seconds, and the reasons of all that was not timed."""
    from weft.core.record import FAIL, UNSUPPORTED
    from weft.workbench.records import is_suspect_by_load, suspect_flags

    not_run = [(r.backend, r.verdict.reason) for r in records if r.verdict.status == UNSUPPORTED]
    points = {(r.operator, r.case, r.direction) for r in records}
    timed = [r for r in records if r.timing is not None]
    by_load = [r for r in timed if own_code and is_suspect_by_load(r)]
    counts = {
        "failed": sum(r.verdict.status == FAIL for r in records),
        "suspect": sum(bool(suspect_flags([r])) for r in timed) - len(by_load),
        "not timed": len(records)
        - len(timed)
        - len(not_run)
        - sum(r.verdict.status == FAIL for r in records),
    }
    against = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
    operators = ending.names_text([r.operator for r in records], "operator")
    text = f"{len(timed)} timed at {ending.count_text(len(points), 'point')} of {operators} ({watch})"
    if stop:
        saved = f"; saved in {save}" if save is not None and records else ""
        text = f"stopped after {ending.count_text(len(points), 'point')}: {len(timed)} timed ({watch}){saved}"
    elif against:
        text = f"failed: {against}; {text}"
    else:
        text = f"passed: {text}"
    if by_load:
        times = ending.count_text(len(by_load), "time")
        text += f"; {times} not to be believed, since the machine was busy: run again when it is quiet"
    return text + ending.not_run_text(not_run)


def _run(device: str | None, save: Path | None, quiet: bool, arguments: dict[str, Any]) -> Iterator[Record]:
    """Yield all records; save and show each point's as soon as it is measured."""
    from weft.core import WeftError
    from weft.machine.query import known_kind
    from weft.workbench import bench as workbench

    kind = known_kind(device)
    if save is not None and save.is_dir():
        raise WeftError("--save", expected="a file", got=f"the folder {save}")
    warn_if_busy(kind)
    n_records = 0
    with progress.Progress(at_once=True) as status:

        def expect(seconds: list[float]) -> None:
            status.expect(seconds, ending.count_text(len(seconds), "point"))

        points = workbench.run_points(device=kind, on_event=status, on_start=expect, **arguments)
        for record in save_and_show(points, save, quiet, status.clear):
            n_records += 1
            yield record
    if not n_records:
        raise WeftError(
            "nothing to bench",
            expected=f"an operator with a bench case for {kind}",
            got="none",
            hint="list the operators with weft ops, or name a --case",
        )


def save_and_show(
    points: Iterator[list[Record]], save: Path | None, quiet: bool, clear_status: Callable[[], None]
) -> Iterator[Record]:
    """Yield the records of the points; save and show each point's before the next one is measured.

    A run that is killed therefore loses at most one point.
    """
    from weft.core.record import append
    from weft.workbench.report import table

    for records in points:
        if save is not None:
            append(save, records)
        clear_status()
        if not quiet:
            for point in table.tables(records):
                output.show_table(point, options=("csv", "json"))
                print()
            sys.stdout.flush()
        yield from records
