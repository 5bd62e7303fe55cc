"""``weft tune``: measure on this machine what `weft.ops` then picks by."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.options import Names

if TYPE_CHECKING:
    from weft.ops._shared.dispatch import Point

EPILOG = "How a call is dispatched: docs/dispatch.md"


def tune(
    operators: Annotated[
        Names, typer.Argument(help="Operators; by default all.", show_default=False)
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print what is chosen at each size; measure nothing.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="With --show: a device by its full name."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Draw the shipped table from these records; measure nothing."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="With --from: the table's file.")
    ] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Measure as long as `weft bench` does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of sizes.")] = False,
) -> None:
    """Measure where each implementation is fastest, and let `weft.ops` pick by it from then on.

    Forward and backward, at each bench case and at smaller sizes around the crossover. Kept in
    Weft's cache folder, over the table that is shipped for this device. Minutes an operator.

    Example: weft tune softmax gelu
    """
    from weft.core import WeftError, registry

    for name in operators or ():
        registry.operator(name)
    if source is None and output is not None:
        raise WeftError("--output goes with --from", expected="--from RECORDS", got="none")
    if source is not None:
        found = _drawn(source, output, operators)
    elif show:
        found = _known(device, operators)
    else:
        found = _measured(operators, thorough)
    _print(found, as_json)


def _drawn(source: Path, output: Path | None, operators: Names) -> list[Point]:
    from weft.core import WeftError
    from weft.ops._shared import dispatch
    from weft.workbench import tune
    from weft.workbench.report import load

    records, torn = load([source])
    if torn:
        print(f"{torn} torn lines passed over", file=sys.stderr)
    drawn = tune.from_records(records)
    if not drawn:
        raise WeftError("no records of a GPU at cases that Weft has", got=source)
    if output is not None and len(drawn) > 1:
        raise WeftError("--output", expected="records of one device", got=", ".join(drawn))
    found = []
    for device, points in drawn.items():
        path = output or dispatch.SHIPPED / f"{dispatch.slug(device)}.json"
        tune.write(path, device, points, source.as_posix())
        print(path, file=sys.stderr)
        found += points
    return [p for p in found if not operators or p.operator in operators]


def _known(device: str | None, operators: Names) -> list[Point]:
    from weft.ops._shared import dispatch

    points = dispatch.points(device or _gpu("--show")[0])
    return [p for p in points if not operators or p.operator in operators]


def _measured(operators: Names, thorough: bool) -> list[Point]:
    from weft.workbench import tune

    name, kind = _gpu("weft tune")
    found = []
    for point in tune.measured(operators, kind, quick=not thorough, say=_say):
        found.append(point)
        path = tune.keep(name, [point])  # each as soon as it is there, so that nothing is lost
    if found:
        print(path, file=sys.stderr)
    return found


def _gpu(what: str) -> tuple[str, str]:
    from weft import machine
    from weft.core import WeftError

    if not machine.has_gpu():
        raise WeftError(
            f"{what}: there is nothing to choose on a CPU, which runs torch's own",
            expected="a GPU, or --show --device NAME",
            got=machine.gpu_reason(),
        )
    return machine.query("cuda").name, "cuda"


def _say(line: str) -> None:
    if "round" not in line:
        print(line, file=sys.stderr, flush=True)


def _print(points: list[Point], as_json: bool) -> None:
    from weft.workbench import tune

    rows = tune.rows(points)
    if as_json:
        print(json.dumps(rows))
        return
    width = max((len(r["case"]) for r in rows), default=4)
    print(f"{'operator':14} {'case':{width}} {'inference':24} training")
    for row in rows:
        print(f"{row['operator']:14} {row['case']:{width}} {_told(row.get('inference')):24} "
              f"{_told(row.get('training'))}".rstrip())  # fmt: skip
    if not rows:
        print("nothing is known of this device: every call runs torch's own", file=sys.stderr)


def _told(one: dict[str, Any] | None) -> str:
    if one is None:
        return "-"
    gain = one["base_us"] / one["us"] if one["us"] else 1.0
    return f"{one['choice']} {one['us']:.1f} us, {gain:.2f}x"
