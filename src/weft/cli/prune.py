"""``weft prune``: iterative magnitude pruning with rewinding, beside its two controls."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output, progress
from weft.cli.options import MAX_SEED, Json

if TYPE_CHECKING:
    from weft.lab.prune.experiment import Plan
    from weft.lab.prune.images import ImageSet

EPILOG = """Examples:
  weft prune
  weft prune --quick --json
  weft prune --data digits.npz --rewind 100 --out prune

Method, controls and a measured result: weft help pruning"""
# The defaults of weft.lab.prune.experiment.Plan, which the help cannot import: that would load torch.
DEFAULTS = "[default: {}; with --quick {}]"


def prune(
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your images: .npz with x and y [default: digits drawn here]"),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=MAX_SEED, help="Seed of images, networks and batches")
    ] = 0,
    networks: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"Seeds of networks, 3 or more {DEFAULTS.format(5, 3)}"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help=f"Steps of each training {DEFAULTS.format(1000, 150)}")
    ] = None,
    rewind: Annotated[int, typer.Option(metavar="N", help="Step to which the weights are rewound")] = 0,
    share: Annotated[
        float, typer.Option(metavar="FRACTION", help="Share of the weights left that a round prunes")
    ] = 0.369,
    rounds: Annotated[
        int | None, typer.Option(metavar="N", help=f"Rounds of pruning {DEFAULTS.format(8, 5)}")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use small networks, in a few seconds")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Output folder of prune.json and the picture prune.svg"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prune networks to winning tickets and compare them with two controls, on a CPU.

    Each round prunes the smallest weights, rewinds the others and trains again. The controls have as many
    weights: the same mask with other initial values, and a random mask.

    Exit 0: winning tickets beat both controls at 10 % density; 1: they do not; 2: invalid arguments.
    """
    if out is not None:
        _validate_out(out)
    requested = {"networks": networks, "steps": steps, "rounds": rounds}
    options: dict[str, Any] = {name: value for name, value in requested.items() if value is not None}
    watch = ending.Stopwatch()
    with progress.stoppable() as stop:
        plan, images = _plan(quick, {**options, "seed": seed, "rewind": rewind, "share": share}, data)
        record = _run(plan, images)
    if stop:
        record = (stop.partial or {}) | stop.to_json()
    saved = ""
    if "rows" in record:
        saved = _save(record, out)
    if as_json:
        print(json.dumps(record))
    elif "rows" in record:
        _show(record)
    ending.print_verdict(_verdict_line(record, saved, watch), to_stderr=as_json)
    if stop or not record["verdict"]["beats_both"]:
        raise typer.Exit(stop.exit_code or 1)


def _plan(quick: bool, options: dict[str, Any], data: Path | None) -> tuple[Plan, ImageSet]:
    """Return the plan and the images; raise :class:`WeftError` for options or a file that are no good."""
    from dataclasses import replace

    from weft.lab.prune import experiment, images

    plan = replace(experiment.QUICK if quick else experiment.Plan(), **options)
    if data is not None:
        return plan, images.read_images(data, plan.seed)
    counts = experiment.QUICK_IMAGES if quick else (experiment.TRAIN_IMAGES, experiment.TEST_IMAGES)
    return plan, images.drawn_digits(*counts, plan.seed)


def _run(plan: Plan, images: ImageSet) -> dict[str, Any]:
    from weft.lab.prune import experiment

    with progress.Progress() as status:

        def expect(remaining: Callable[[], float]) -> None:
            what = f"{plan.rounds} rounds with {plan.networks} seeds"
            status.expect_by(remaining, plan.rounds + 1, what)

        return experiment.run(images, plan, log=status, expect=expect)


def _validate_out(out: Path) -> None:
    """Raise :class:`WeftError` for a folder that cannot be written, or without matplotlib."""
    from importlib.util import find_spec

    from weft.core import WeftError
    from weft.core.output_files import require_folder

    if find_spec("matplotlib") is None:
        hint = "pip install 'weft[plots]', or --json without --out"
        raise WeftError("the picture is drawn with matplotlib", got="none", hint=hint)
    require_folder(out, "--out")


def _save(record: dict[str, Any], out: Path | None) -> str:
    """Write the record and the picture; return the end of the verdict that names the folder."""
    from weft.lab.prune import report

    if out is None:
        return ""
    (out / report.RECORD).write_text(json.dumps(record, indent=1) + "\n")
    report.plot(record, out / report.PICTURE)
    return f"; {report.RECORD} and {report.PICTURE} in {out}"


def _show(record: dict[str, Any]) -> None:
    from weft.core.table import plain_table
    from weft.lab.prune import report

    for columns, rows in (report.accuracy_table(record), report.storage_table(record)):
        priorities = {"values": 1, "bitmask": 1, "indices": 1}
        output.show_table(plain_table(columns, rows, numeric=columns, priorities=priorities))
        print()
    output.show_notes(report.notes(record), indent="  ", style="dim")


def _verdict_line(record: dict[str, Any], saved: str, watch: ending.Stopwatch) -> str:
    """Return the last line: the verdict with its margins, the seconds, and the files."""
    from weft.lab.prune import report

    if "rows" not in record:
        return f"stopped before a density was done ({watch}); nothing is saved"
    if record.get("stopped"):
        densities, planned = len(record["rows"]), record["plan"]["rounds"] + 1
        return f"stopped after {densities} of {planned} densities ({watch}){saved}"
    status = "passed" if record["verdict"]["beats_both"] else "failed"
    return f"{status}: {report.verdict_text(record)} ({watch}){saved}"
