"""``weft selftest``: check the checks, by kernels that must fail and honest ones that must pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output, progress
from weft.cli.busy import warn_if_busy
from weft.cli.options import Csv, Device, Json, Names
from weft.core.errors import WeftError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weft.core.table import Table
    from weft.workbench.selftest.judge import MutantResult
    from weft.workbench.selftest.mutants.mutant import Mutant

EPILOG = """Examples:
  weft selftest --operator softmax
  weft selftest --operator softmax --without guards
  weft selftest --shard 0/4 --save part-0.json

Planted kernels and the checks that catch them: weft help tested"""

MAX_JOBS, MAX_RUNS = 1024, 1_000_000


def selftest(
    operator: Annotated[
        Names, typer.Option(metavar="NAME", help="Only mutants of this operator (repeatable)")
    ] = None,
    row: Annotated[
        Names, typer.Option("--row", metavar="ROW", help="Only one kind of fault, such as W05 (repeatable)")
    ] = None,
    without: Annotated[
        Names,
        typer.Option(metavar="CHECK", help="Skip this check or kind of cases (repeatable)"),
    ] = None,
    mutant: Annotated[Names, typer.Option(metavar="ID", help="Only this mutant (repeatable)")] = None,
    part: Annotated[
        str | None,
        typer.Option("--shard", metavar="I/N", help="Only part I of N parts of the mutants, I from 0"),
    ] = None,
    device: Device = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=1, max=MAX_JOBS, help="Number of mutants judged at once")
    ] = 2,
    as_list: Annotated[bool, typer.Option("--list", help="List the planted kernels; run none")] = False,
    honest: Annotated[
        int, typer.Option(metavar="N", min=0, max=MAX_RUNS, help="Judge Weft's own kernels N times instead")
    ] = 0,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the JSON to this file")
    ] = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Run Weft on kernels known to be broken, cheating or honest, and report which check catches each.

    Each is judged in a worker process, as your code is. Use --without CHECK to see which faults only
    that check catches.

    Exit 0: all mutants that ran were caught and every control passed; 1: otherwise; 2: invalid
    arguments.
    """
    output.only_one_format(json=as_json, csv=as_csv)
    from weft.machine.query import known_kind
    from weft.workbench.selftest.run import Summary, remaining_time, run, select, shard

    if as_csv and (honest or as_list):
        raise WeftError("--csv", expected="a run of the planted kernels", got="--honest or --list")
    kind = known_kind(device)
    if honest:
        _run_honest(honest, kind, as_json, save)
        return
    mutants = select(operator or (), row or (), mutant or ())
    mutants = mutants if part is None else shard(mutants, part)
    if not as_list:
        warn_if_busy(kind)
    if as_list:
        _list(mutants, as_json)
        return
    watch, results = ending.Stopwatch(), []
    with progress.stoppable() as stop, progress.Progress() as status:

        def on_done(result: MutantResult, done: int, total: int) -> None:
            results.append(result)
            _show_progress(status, result, done, total)

        remaining = remaining_time(mutants, kind, jobs)
        status.expect_by(remaining, len(mutants), f"{len(mutants)} planted kernels")
        status("judging")
        run(mutants, kind, without=without or (), jobs=jobs, on_done=on_done, remaining=remaining)
    by_id = {r.id: r for r in results}
    judged = [m for m in mutants if m.id in by_id]
    summary = Summary(results=tuple(by_id[m.id] for m in judged), planted=tuple(judged))
    report = _save(summary.to_json() | stop.to_json(), kind, save)
    if as_json:
        print(json.dumps(report))
    elif as_csv:
        output.print_csv(kill_table(report))
    else:
        show(report)
    line = _verdict_line(report, summary.good, len(mutants), watch, stop)
    ending.print_verdict(line, to_stderr=as_json or as_csv)
    if stop or not summary.good:
        raise typer.Exit(stop.exit_code or 1)


def _verdict_line(
    report: dict[str, Any], good: bool, total: int, watch: ending.Stopwatch, stop: progress.StopRequest
) -> str:
    """Return the last line: kills, controls, seconds, and the mutants that did not run."""
    killed = f"killed {report['killed']} of {report['planted']} that ran"
    passed = f"{report['controls_passed']} of {report['controls']} honest controls passed"
    verdict = "passed" if good else "failed"
    if stop:
        done = report["planted"] + report["controls"] + len(report["not_run"])
        verdict = f"stopped after {done} of {total} planted kernels"
    elif not report["planted"] + report["controls"]:
        verdict = "nothing could run"
    not_run = [(m["id"].split("/")[2], m["reason"]) for m in report["not_run"]]
    counts = f"{killed}; {passed}" if report["controls"] else killed
    return f"{verdict}: {counts} ({watch}){ending.not_run_text(not_run)}"


def _save(report: dict[str, Any], device: str, save: Path | None) -> dict[str, Any]:
    """Return the report with the machine's fingerprint; also write it to ``save``."""
    from weft.machine import fingerprint

    report = report | {"machine": fingerprint(device)}
    if save is not None:
        save.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _show_progress(status: progress.Progress, result: MutantResult, done: int, total: int) -> None:
    """Show a result; one that may be wrong stays on the screen."""
    by = f" by {result.check} at {result.case or 'its process'}" if result.check else ""
    # An honest control (its id starts with H) is meant to survive.
    honest = result.id.startswith("H")
    verdict = "passed" if result.status == "survived" and honest else result.status
    if (result.status == "killed" and honest) or (result.status == "survived" and not honest):
        status.keep(f"{result.id}: {verdict}{by} ({result.seconds:.1f} s)")
    status.advance()
    status(f"after {result.id}: {verdict}{by}")


def _run_honest(count: int, device: str, as_json: bool, save: Path | None) -> None:
    """Judge Weft's own kernels; exit 1 for a false alarm."""
    from weft.workbench.selftest.honest import HonestRuns, run

    watch = ending.Stopwatch()
    with progress.stoppable() as stop, progress.Progress(total=count) as status:

        def on_done(line: str, done: int, total: int) -> None:
            status.advance()
            status(line)

        status("judging")
        runs = run(count, device, on_done)
    if stop:
        runs = stop.partial or HonestRuns(runs=0, verdicts=0, alarms=())
    report = _save(runs.to_json() | stop.to_json(), device, save)
    if as_json:
        print(json.dumps(report))
    else:
        for v in runs.alarms:
            print(f"false alarm: {v.operator} {v.implementation} {v.case} {v.direction}: {v.reason}")
    verdict = f"stopped after {runs.runs} of {count}" if stop else "failed" if runs.alarms else "passed"
    counts = f"{runs.runs} honest runs, {runs.verdicts} verdicts: {len(runs.alarms)} false alarms"
    ending.print_verdict(f"{verdict}: {counts} ({watch})", to_stderr=as_json)
    if stop or runs.alarms:
        raise typer.Exit(stop.exit_code or 1)


def _list(mutants: list[Mutant], as_json: bool) -> None:
    if as_json:
        entries = [
            {
                "id": m.id,
                "title": m.title,
                "killed_by": list(m.killed_by),
                "only": m.only,
                "phase": m.phase,
                "devices": list(m.devices),
                "honest": m.honest,
            }
            for m in mutants
        ]
        print(json.dumps(entries))
        return
    for m in mutants:
        expectation = "must pass" if m.honest else f"killed by {', '.join(m.killed_by)}"
        print(f"{m.id}: {m.title} ({expectation})")
    controls = sum(m.honest for m in mutants)
    ending.print_verdict(
        f"{len(mutants) - controls} planted kernels, {controls} honest controls; none was run"
    )


def kill_table(report: Mapping[str, Any]) -> Table:
    """Return the number of killed mutants by operator, with those planted, and by the check that killed."""
    from weft.core.table import Column, Number, Table

    rows = [("operator", n, c["killed"], c["planted"]) for n, c in report["by_operator"].items()]
    rows += [("check", n, count, None) for n, count in report["by_check"].items()]
    columns = (
        Column("by"),
        Column("name"),
        Column("killed", numeric=True),
        Column("planted", numeric=True),
    )
    cells = [
        (by, name, *(Number("" if n is None else str(n), n) for n in numbers)) for by, name, *numbers in rows
    ]
    return Table(columns, cells)


def show(report: dict[str, Any]) -> None:
    """Print the kill rates, then mutants that survived, were killed by another check or did not run."""
    output.show_table(kill_table(report), options=("csv", "json"))
    print()
    for mutant in report["unexpected"]:
        expected = ", ".join(mutant["meant"])
        output.show_notes(
            [f"killed by another check: {mutant['id']}: {mutant['killed_by']}, not {expected}"], style=""
        )
    ids_by_reason: dict[str, list[str]] = {}
    for mutant in report["not_run"]:
        ids_by_reason.setdefault(mutant["reason"], []).append(mutant["id"])
    for reason, ids in ids_by_reason.items():
        first_ids = ", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "")
        output.show_notes([f"not run: {reason} ({len(ids)}: {first_ids})"], style="")
    for mutant in report.get("inconclusive", ()):
        output.show_notes([f"inconclusive: {mutant['id']}: {mutant['reason']}"], style="yellow")
    for name in report["survivors"]:
        output.show_notes([f"survived: {name}"], style="red")
    for control in report["false_alarms"]:
        output.show_notes(
            [f"false alarm on an honest kernel: {control['id']}: {control['reason']}"], style="red"
        )
