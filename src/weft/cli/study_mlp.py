"""The MLP study of ``weft study``: its options, its measurement, its tables and its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weft.cli import ending, output, progress
from weft.cli.busy import warn_if_busy

if TYPE_CHECKING:
    from pathlib import Path

    from weft.lab.study.report import Table
    from weft.lab.study.workload import Sizes

OPTIONS = ("depths", "widths", "batches", "steps", "dtype")
FILE = "study.json"
PARTIAL = "points"  # a stopped study is saved if it has this field


def format_number() -> int:
    """Return the format of the records that this version reads."""
    from weft.lab.study.mlp import FORMAT

    return FORMAT


def measure(device: str | None, options: Mapping[str, str | None], quick: bool) -> dict[str, Any]:
    """Run the study; ``options`` are the texts of ``OPTIONS``. Raises :class:`WeftError` for bad ones."""
    from dataclasses import replace

    from weft.lab.study import mlp, workload
    from weft.machine import known_kind

    kind = known_kind(device)
    warn_if_busy(kind)
    lists: dict[str, Any] = {
        name: _numbers(name, text) for name, text in options.items() if text is not None and name != "dtype"
    }
    chosen: Sizes = replace(workload.default_sizes(kind, quick, options["dtype"]), **lists)
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


def plot_all(record: Mapping[str, Any], out: Path) -> list[Path]:
    """Draw the five pictures into a folder."""
    from weft.lab.study.report import plot_all

    return plot_all(record, out)


def show(record: dict[str, Any]) -> None:
    """Print the tables, the sentences and the faults."""
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


def verdict(record: Mapping[str, Any], ending_text: str, stopped: bool) -> str:
    """Return the last line: the faults, the number of points, and ``ending_text``: time and files."""
    points = [p for sweep in record["points"].values() for p in sweep]
    text = f"{ending.count_text(len(points), 'point')} of the MLP on {record['device']} {ending_text}"
    if stopped:
        rounds = min(p["samples"] for p in points)
        return f"stopped after {ending.count_text(rounds, 'round')} of {text}; without a profile"
    if record["wrong"]:
        return f"wrong: {ending.count_text(len(record['wrong']), 'fault')} in {text}"
    return f"good: {text}"
