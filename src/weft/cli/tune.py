"""``weft tune``: measure on this machine the times by which ``weft.ops`` chooses implementations."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output, progress
from weft.cli.options import Csv, Json, Names, Seed, select_device
from weft.cli.tune_audit import Audit, Compiled, Merge, Points, audit, merge_audits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from weft.core.table import Number, Table
    from weft.dispatch.choice import Point

MOST_MINUTES = 24 * 60
EPILOG = """Examples:
  weft tune softmax gelu
  weft tune --audit --points 400 --seed 1
  weft tune --audit --merge first.json --merge second.json

Dispatch of a call: weft help dispatch"""

Impl = Annotated[
    list[str] | None,
    typer.Option("--impl", metavar="NAME", help="Implementation to measure (repeatable) [default: all]"),
]
Save = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Append the records to this JSON Lines file, for --from")
]
Minutes = Annotated[float | None, typer.Option(metavar="N", help="Time limit in minutes [default: 10]")]
Thorough = Annotated[
    bool, typer.Option("--thorough", help="Measure every point for as long as weft bench does")
]


def tune(
    operators: Annotated[Names, typer.Argument(metavar="OPERATOR", help="Operators [default: all]")] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the choice at each size; measure nothing")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            callback=select_device,
            help="GPU to measure, as cuda:N; with --audit also cpu, with --show also a GPU's full name "
            "[default: this machine's]",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RECORDS", help="Build the shipped table from records; measure nothing"
        ),
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="With --from: table to write")
    ] = None,
    impl: Impl = None,
    save: Save = None,
    minutes: Minutes = None,
    thorough: Thorough = False,
    against_torch: Audit = False,
    n_points: Points = None,
    seed: Seed = None,
    compiled: Compiled = False,
    merge: Merge = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Measure where each implementation is fastest, and use the results for dispatch from then on.

    Measures forward and backward for at most ten minutes, where the choice is most uncertain; with
    --thorough at each bench case and at smaller sizes around the crossover. The results go to
    Weft's cache folder and take precedence over the table that is shipped for this GPU.

    With --audit: time calls as they are dispatched against torch's own at random points with the
    dimensions of real models. Exit 1: a call takes longer than torch's by a factor of 1/0.95.
    """
    from weft.core import WeftError, registry

    output.only_one_format(json=as_json, csv=as_csv)
    for name in operators or ():
        registry.operator(name)
    if source is None and table is not None:
        raise WeftError("--output requires --from", expected="--from RECORDS", got="none")
    is_measuring = not (against_torch or show or source is not None)
    _check_measurement(is_measuring, thorough, minutes, impl, save, against_torch)
    if against_torch:
        if show or source is not None or thorough:
            raise WeftError("--audit", expected="neither --show, --from nor --thorough", got="both")
        measurement, formats = (operators, device, n_points, seed, minutes, compiled), (as_json, as_csv)
        return merge_audits(merge, measurement, formats) if merge else audit(*measurement, formats)
    if n_points is not None or seed is not None or compiled or merge:
        options = "--points, --seed, --compiled and --merge"
        raise WeftError(f"{options} require --audit", expected="--audit", got="none")
    watch = ending.Stopwatch()
    with progress.stoppable() as stop:
        points: list[Point] = []
        if source is not None:
            points += _from_records(source, table, operators)
        elif show:
            points += _known_points(None if device == "cuda" else device, operators)
        else:
            points += _measure(operators, thorough, minutes, impl, save)
    if stop:
        points = stop.partial or []
    _print(points, as_json, as_csv, stop, show)
    verb = "measured: " if is_measuring else "written: " if source is not None else ""
    ending.print_verdict(_verdict(points, verb, str(watch), bool(stop)), to_stderr=as_json or as_csv)
    if stop:
        raise typer.Exit(stop.exit_code)


def _verdict(points: Sequence[Point], verb: str, seconds: str, stopped: bool) -> str:
    names = ending.names_text([p.operator for p in points], "operator")
    count = ending.count_text(len(points), "point") + (f" of {names}" if points else "")
    if stopped:
        return f"stopped after {count} ({seconds}); each was saved at once"
    return f"{verb}{count} ({seconds})"


def _check_measurement(
    is_measuring: bool,
    thorough: bool,
    minutes: float | None,
    impl: Names,
    save: Path | None,
    against_torch: bool,
) -> None:
    """Raise :class:`WeftError` for options of a measurement that is not made, or cannot be."""
    from weft.core import WeftError
    from weft.dispatch.choice import BASELINES

    if not is_measuring and (save is not None or impl or (minutes is not None and not against_torch)):
        got = "--audit, --show or --from"
        raise WeftError("--impl, --minutes and --save", expected="a measurement", got=got)
    if thorough and (minutes is not None or impl):
        raise WeftError("--thorough", expected="neither --minutes nor --impl", got="both")
    if minutes is not None and not 0 < minutes <= MOST_MINUTES:
        raise WeftError("--minutes", expected=f"above 0, at most {MOST_MINUTES}", got=minutes)
    if impl and not set(impl) & set(BASELINES):
        raise WeftError("--impl", expected="torch or eager among them, to compare with", got=", ".join(impl))
    if save is not None and save.is_dir():
        raise WeftError("--save", expected="a file", got=f"the folder {save}")


def _from_records(source: Path, table: Path | None, operators: Names) -> list[Point]:
    """Write the table of each device among the records; return the points of the named operators."""
    from weft.core import WeftError
    from weft.core.text import slug
    from weft.dispatch import choice
    from weft.workbench import tune
    from weft.workbench.report import load

    records, torn = load([source])
    records = list(records)
    if torn:
        output.log(f"{torn} torn lines skipped")
    by_device = tune.from_records(records)
    if not by_device:
        raise WeftError("no GPU records at Weft's cases", got=source)
    if table is not None and len(by_device) > 1:
        raise WeftError("--output", expected="records of one device", got=", ".join(by_device))
    points, facts = [], tune.facts_of(records)
    for device, of_device in by_device.items():
        path = table or choice.SHIPPED / f"{slug(device)}.json"
        header = {**facts.get(device, {}), **tune.host_times_of(device, source)}
        tune.write(path, device, of_device, source.as_posix(), header)
        output.log(str(path))
        points += of_device
    return [p for p in points if not operators or p.operator in operators]


def _known_points(device: str | None, operators: Names) -> list[Point]:
    from weft.dispatch import choice

    name = device or _gpu_name("--show")
    architecture = None if device else _architecture()
    table = choice.table((name, architecture))
    if table.borrowed:
        output.log(f"no table for {name}: {table.borrowed} counts until weft tune has measured here")
    points = table.points
    return [p for p in points if not operators or p.operator in operators]


def _measure(
    operators: Names, thorough: bool, minutes: float | None, impl: Names, save: Path | None
) -> list[Point]:
    """Measure and save; raise :class:`Interrupted` with the points so far for a ``KeyboardInterrupt``."""
    from weft.core import Interrupted
    from weft.core.record import append
    from weft.workbench import tune
    from weft.workbench.tuning import plan as tune_plan

    limit = tune_plan.LIMIT_SECONDS if minutes is None else minutes * 60
    options: dict[str, Any] = {} if save is None else {"save": partial(append, save)}

    gpu = _gpu_name("weft tune")
    points: list[Point] = []
    path = None
    with progress.Progress(at_once=True) as status:
        measured: Iterator[Point | None]
        if thorough:
            expected = tune.expected_seconds(operators, "cuda")
            measured = tune.measure_points(operators, "cuda", on_event=status.describe, **options)
        else:
            cases = tune.candidates(operators, "cuda")
            planned = tune_plan.plan(cases, "cuda", (gpu, _architecture()), limit, impl)
            expected = [case.seconds for case in planned]
            output.log(f"measuring the {len(planned)} most uncertain of {len(cases)} cases; --thorough: all")
            options |= {} if minutes is None else {"limit": limit}
            options |= {"names": impl} if impl else {}
            measured = tune.measure_planned(planned, "cuda", on_event=status.describe, **options)
        status.expect(expected, ending.count_text(len(expected), "point"))
        try:
            for point in measured:
                if point is not None:
                    points.append(point)
                    # At once, so that an interrupted run loses at most one point.
                    path = tune.store(gpu, [point])
                status.advance()
        except KeyboardInterrupt as error:
            raise Interrupted(points) from error
    if path is not None:
        output.log(str(path))
    return points


def _gpu_name(request: str) -> str:
    """Return the name of this machine's GPU; raise :class:`WeftError` if there is none."""
    from weft import machine
    from weft.core import WeftError

    if not machine.has_gpu():
        raise WeftError(
            f"{request}: on a CPU every call runs PyTorch's own implementation",
            expected="a GPU, or --show --device NAME",
            got=machine.gpu_reason(),
        )
    return machine.query("cuda").name


def _architecture() -> str:
    from weft import machine

    return machine.query("cuda").arch


def _print(points: list[Point], as_json: bool, as_csv: bool, stop: progress.StopRequest, show: bool) -> None:
    from weft.workbench import tune

    rows = tune.rows(points)
    if as_json:
        print(json.dumps({**stop.to_json(), "points": rows} if stop else rows))
    elif as_csv:
        output.print_csv(choice_table(rows))
    elif rows:
        output.show_table(choice_table(rows), options=("csv", "json"))
    if not rows and show:
        output.log("no measurements for this device: every call runs torch's own implementation")


def choice_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the choice of each mode at each case: implementation, time, and speed-up over PyTorch's own."""
    from weft.core.table import Column, Table

    modes = ("inference", "training")
    columns = [Column("operator"), Column("case")]
    for mode in modes:
        columns += [
            Column(mode),
            Column(f"{mode} time", 2, numeric=True, unit="us"),
            Column(f"{mode} speed-up", 1, numeric=True),
        ]
    cells = [(r["operator"], r["case"], *(c for m in modes for c in _choice(r.get(m)))) for r in rows]
    return Table(columns, cells)


def _choice(entry: Mapping[str, Any] | None) -> tuple[str, Number, Number]:
    """Return the cells of a choice: the implementation, its time, and the speed-up over PyTorch's own."""
    from weft.core.table import Number
    from weft.workbench.report.table import duration

    if entry is None:
        return "-", Number("", None), Number("", None)
    speedup = entry["base_us"] / entry["us"] if entry["us"] else 1.0
    return entry["choice"], duration(entry["us"]), Number(f"{speedup:.2f}x", speedup)
