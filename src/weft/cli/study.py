"""``weft study``: time a whole program over its sizes, fit the times, compare them with the roofline."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output, progress
from weft.cli.busy import warn_if_busy
from weft.cli.options import Device, Json
from weft.core.json_files import content_errors, read_json

if TYPE_CHECKING:
    from weft.lab.study.report import Table
    from weft.lab.study.workload import Sizes

EPILOG = """Examples:
  weft study mlp
  weft study mlp --device cpu --quick --out study
  weft study mlp --redraw study/study.json

Measurement, fits and results: weft help study"""
STUDIES = ("mlp",)
LIST = "as a list such as 1,2,4"


def study(
    name: Annotated[str, typer.Argument(metavar="STUDY", help="Study to run: mlp")],
    device: Device = None,
    depths: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help=f"Numbers of layers, {LIST}. A size that does not vary stays at the middle of its list",
        ),
    ] = None,
    widths: Annotated[str | None, typer.Option(metavar="LIST", help="Layer widths, as a list")] = None,
    batches: Annotated[str | None, typer.Option(metavar="LIST", help="Batch sizes, as a list")] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="LIST", help="Numbers of consecutive training steps, as a list")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="fp32|bf16|fp16", help="Data type [default: by the device]")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Output folder of the record and the pictures")
    ] = Path("study-mlp"),
    redraw: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the pictures of this record again; measure nothing"),
    ] = None,
    no_pictures: Annotated[
        bool, typer.Option("--no-pictures", help="Write only the record, without matplotlib")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes, in a few seconds")] = False,
    as_json: Json = False,
) -> None:
    """Time an MLP over steps, layers, width and batch, to show how it scales and what limits it.

    Writes study.json and five pictures.

    Exit 0: good; 1: a loss, a FLOP count or a time is wrong; 2: invalid arguments.
    """
    from weft.core import WeftError

    if name not in STUDIES:
        raise WeftError("a study", expected=" or ".join(STUDIES), got=name)
    if out.exists() and not out.is_dir():
        raise WeftError("--out", expected="a folder", got=f"the file {out}")
    if not no_pictures:
        _require_matplotlib()
    watch, pictures = ending.Stopwatch(), 0
    with progress.stoppable() as stop:
        if redraw is not None:
            record = _read(redraw)
        else:
            lists = {"depths": depths, "widths": widths, "batches": batches, "steps": steps}
            record = _measure(device, dtype, lists, quick)
    if stop:
        record = (stop.partial or {}) | stop.to_json()
    if redraw is None and "points" in record:
        out.mkdir(parents=True, exist_ok=True)
        (out / "study.json").write_text(json.dumps(record, indent=1) + "\n")
    with nullcontext() if redraw is None else content_errors(redraw, "a study.json"):
        if not (no_pictures or stop):
            from weft.lab.study.report import plot_all

            for path in plot_all(record, out):
                output.log(f"picture: {path}")
                pictures += 1
        if as_json:
            print(json.dumps(record))
        elif redraw is not None or "points" in record:
            _show(record)
        line = _verdict_line(record, pictures, out if redraw is None else None, watch, stop)
    ending.print_verdict(line, to_stderr=as_json)
    if stop or record["wrong"]:
        raise typer.Exit(stop.exit_code or 1)


def _verdict_line(
    record: dict[str, Any],
    pictures: int,
    out: Path | None,
    watch: ending.Stopwatch,
    stop: progress.StopRequest,
) -> str:
    """Return the last line: the faults, the number of points, and the files."""
    if stop and "points" not in record:
        return f"stopped before enough was measured ({watch}); nothing is saved"
    saved = f"; saved in {out / 'study.json'}" if out is not None else ""
    saved += f"; {ending.count_text(pictures, 'picture')}" if pictures else ""
    points = [p for sweep in record["points"].values() for p in sweep]
    text = f"{ending.count_text(len(points), 'point')} of the MLP on {record['device']} ({watch}){saved}"
    if stop:
        rounds = min(p["samples"] for p in points)
        return f"stopped after {ending.count_text(rounds, 'round')} of {text}; without a profile"
    if record["wrong"]:
        return f"wrong: {ending.count_text(len(record['wrong']), 'fault')} in {text}"
    return f"good: {text}"


def _require_matplotlib() -> None:
    """Raise :class:`WeftError` without matplotlib: before the measurement, which takes minutes."""
    from importlib.util import find_spec

    from weft.core import WeftError

    if find_spec("matplotlib") is None:
        raise WeftError(
            "the study's pictures are drawn with matplotlib",
            got="none",
            hint="pip install 'weft[plots]', or --no-pictures now and --redraw elsewhere",
        )


def _measure(
    device: str | None, dtype: str | None, lists: dict[str, str | None], quick: bool
) -> dict[str, Any]:
    from dataclasses import replace

    from weft.lab.study import mlp, workload
    from weft.machine import known_kind

    kind = known_kind(device)
    warn_if_busy(kind)
    options: dict[str, Any] = {name: _numbers(name, text) for name, text in lists.items() if text is not None}
    chosen: Sizes = replace(workload.default_sizes(kind, quick, dtype), **options)
    with progress.Progress(every_line=True) as status:
        seconds = mlp.EXPECTED_QUICK_SECONDS if quick else mlp.EXPECTED_SECONDS[kind]
        status.announce(seconds, f"{len(chosen.points())} points")
        return mlp.run(kind, chosen, quick=quick, log=status)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    from weft.core import WeftError

    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise WeftError(f"--{option}", expected="integers such as 1,2,4", got=text) from error


def _read(path: Path) -> dict[str, Any]:
    """Read a study's record; raise :class:`WeftError` for anything else."""
    from weft.core import WeftError
    from weft.lab.study.mlp import FORMAT

    try:
        record = read_json(path)
    except (OSError, ValueError) as error:
        raise WeftError("--redraw", expected="a study.json", got=f"{path}: {error}") from error
    if not isinstance(record, dict) or (record.get("study"), record.get("format")) != ("mlp", FORMAT):
        raise WeftError("--redraw", expected=f"a study of the mlp in format {FORMAT}", got=path)
    return record


def _show(record: dict[str, Any]) -> None:
    from weft.core.table import plain_table
    from weft.lab.study import report

    tables: list[Table] = [
        report.scaling_table(record),
        report.kinds_table(record),
        report.transition_table(record),
    ]
    priorities = {"95 % interval": 1, "roofline": 2, "points": 3}
    for columns, rows in tables:
        # Only the shares by kind of operator are all numbers.
        numeric = columns if columns[0] == "batch" else ()
        output.show_table(plain_table(columns, rows, numeric=numeric, priorities=priorities, fold=12))
        print()
    output.show_notes(report.sentences(record), indent="", style="")
    output.show_notes([f"wrong: {line}" for line in record["wrong"]], style="red")
