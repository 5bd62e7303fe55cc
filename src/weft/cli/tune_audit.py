"""``weft tune --audit``: dispatched calls against torch's own at random points of real models."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output, progress
from weft.cli.busy import warn_if_busy
from weft.cli.options import MAX_SEED, Names

if TYPE_CHECKING:
    from weft.core.table import Table
    from weft.workbench.tuning.audit import AuditResult, Summary
    from weft.workbench.tuning.audit_points import AuditPoint

POINTS = 100
Audit = Annotated[
    bool, typer.Option("--audit", help="Compare dispatched calls with torch's own; store nothing")
]
Points = Annotated[
    int | None,
    typer.Option(
        "--points", metavar="N", min=1, max=10_000, help="With --audit: random points [default: 100]"
    ),
]

Compiled = Annotated[
    bool, typer.Option("--compiled", help="With --audit: compare both sides under torch.compile")
]
Merge = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="With --audit: report the JSON of earlier audits as one (repeatable); no measuring",
    ),
]


def audit(
    operators: Names,
    device: str | None,
    n_points: int | None,
    seed: int | None,
    minutes: float | None,
    compiled: bool,
    formats: tuple[bool, bool],
) -> None:
    """Measure and print; exit 1 if a call is slower than 0.95 of torch's or has other results.

    An audit that compares nothing exits with 1 too. No point is begun after ``minutes``. ``formats``: JSON,
    CSV.

    ``device`` is 'cpu', 'cuda' or None for this machine's; a ``seed`` of None takes a random one.
    """
    from weft.machine.fingerprint import fingerprint
    from weft.machine.query import known_kind
    from weft.workbench.tuning.audit import summarise
    from weft.workbench.tuning.audit_points import random_points

    as_json, as_csv = formats
    kind, count = known_kind(device), n_points or POINTS
    if seed is None:
        seed = random.SystemRandom().randrange(MAX_SEED)
    points = random_points(count, seed, kind, operators)
    if compiled:
        points = [replace(p, captured=False, compiled=True) for p in points]
    output.log(f"{ending.count_text(count, 'point')} with --seed {seed}")
    warn_if_busy(kind)
    watch, results = ending.Stopwatch(), []
    with progress.stoppable() as stop:
        results = _measure(points, kind, seed, None if minutes is None else 60 * minutes)
    if stop:
        results = stop.partial or []
    summary = summarise(results)
    if as_json:
        record = {"seed": seed, "machine": fingerprint(kind), "summary": summary.to_json()}
        print(json.dumps({**stop.to_json(), **record, "points": [r.to_json() for r in results]}))
    elif as_csv:
        output.print_csv(_table(results))
    else:
        _print(results, summary)
    if minutes is not None and len(results) < count and not stop:
        output.log(f"time limit of {minutes:g} min: {len(results)} of {ending.count_text(count, 'point')}")
    _judge(results, summary, str(watch), stop, to_stderr=as_json or as_csv)


def merge_audits(files: Sequence[Path], options: Sequence[Any], formats: tuple[bool, bool]) -> None:
    """Print the points of earlier audits as one report; exit as :func:`audit` does.

    ``options`` are those of a measurement, of which none may be given. Raises :class:`WeftError` for one, and
    for a file that ``weft tune --audit --json`` did not write.
    """
    from weft.core import WeftError
    from weft.core.json_files import read_json
    from weft.workbench.tuning.audit import AuditResult, summarise

    if any(value is not None and value is not False for value in options):
        raise WeftError("--merge", expected="no other option of --audit", got="an option of a measurement")
    as_json, as_csv = formats
    watch, results, audits = ending.Stopwatch(), [], []
    for file in files:
        try:
            data = read_json(file)
            audits.append({"seed": data["seed"], "machine": data["machine"]})
            results += [AuditResult.from_json(p) for p in data["points"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            hint = "write it by weft tune --audit --json"
            raise WeftError(
                f"--merge {file}", expected="an audit's JSON", got=repr(error), hint=hint
            ) from error
    summary = summarise(results)
    if as_json:
        points = [r.to_json() for r in results]
        print(json.dumps({"audits": audits, "summary": summary.to_json(), "points": points}))
    elif as_csv:
        output.print_csv(_table(results))
    else:
        _print(results, summary)
    _judge(results, summary, str(watch), None, to_stderr=as_json or as_csv)


def _judge(
    results: Sequence[AuditResult],
    summary: Summary,
    seconds: str,
    stop: progress.StopRequest | None,
    *,
    to_stderr: bool,
) -> None:
    """Print the verdict; exit 1 if it is against Weft."""
    failing = sum(r.is_against for r in results)
    ending.print_verdict(_verdict(summary, failing, seconds, bool(stop)), to_stderr=to_stderr)
    if stop or failing or not summary.points:
        raise typer.Exit((stop.exit_code if stop else 0) or 1)


def _measure(
    points: Sequence[AuditPoint], kind: str, seed: int, limit: float | None = None
) -> list[AuditResult]:
    """Measure the points; raise :class:`Interrupted` with the results so far for a ``KeyboardInterrupt``."""
    from weft.core import Interrupted
    from weft.workbench.tuning import audit as workbench

    results: list[AuditResult] = []
    with progress.Progress(at_once=True) as status:
        status.expect(workbench.expected_seconds(points, kind), ending.count_text(len(points), "point"))
        try:
            for result in workbench.run(points, kind, seed=seed, limit=limit, on_event=status):
                results.append(result)
                status.advance()
        except KeyboardInterrupt as error:
            raise Interrupted(results) from error
    return results


def _verdict(summary: Summary, failing: int, seconds: str, stopped: bool) -> str:
    text = f"{ending.count_text(summary.points, 'point')} compared ({seconds})"
    if summary.left_out:
        text += f"; {summary.left_out} left out"
    if stopped:
        return f"stopped after {text}"
    if failing:
        parts = [f"{summary.slow} slower than 0.95 of torch"] if summary.slow else []
        parts += [f"{summary.differing} with other results or errors"] if summary.differing else []
        return f"failed: {', '.join(parts)}; {text}"
    return f"passed: {text}" if summary.points else f"failed: {text}"


def _print(results: Sequence[AuditResult], summary: Summary) -> None:
    from weft.workbench.tuning.audit import worst

    if results:
        output.show_table(_table(worst(results)), options=("csv", "json"))
        print()
    for r in results:
        if r.problem and not r.differs:
            print(f"{r.problem}: {r.point.title}")
    if summary.geometric_mean is None:
        return
    quantiles = ", ".join(f"{name} {value:.2f}" for name, value in summary.quantiles.items())
    print(f"torch's time over Weft's: geometric mean {summary.geometric_mean:.3f}; quantiles {quantiles}")
    print(f"above 1.05: {summary.above:.0%} of the points; below 0.95: {summary.below:.0%}")
    print(
        f"below 0.95 beyond noise: {summary.slow}, of which {summary.slow_by_host} run torch's own eagerly "
        f"(Weft's host time); noisy: {summary.noisy}"
    )


def _table(results: Sequence[AuditResult]) -> Table:
    from weft.core.table import Column, Number, Table
    from weft.workbench.report.table import duration

    columns = [
        Column("ratio", numeric=True),
        Column("point", fold=24),
        Column("weft", numeric=True, unit="us"),
        Column("torch", 1, numeric=True, unit="us"),
        Column("implementation"),
        Column("reason", 2, fold=24),
        Column("model", 3),
        Column("problem", 1, fold=24),
    ]
    rows = []
    for r in results:
        ratio = Number("-" if r.ratio is None else f"{r.ratio:.2f}", r.ratio)
        times = [Number("-", None) if us is None else duration(us) for us in (r.ours_us, r.torch_us)]
        problem = r.problem or ("noisy" if r.is_slow and r.is_noisy else "; ".join(r.flags))
        rows.append((ratio, r.point.title, *times, r.implementation or "-", r.reason, r.point.model, problem))
    return Table(columns, rows)
