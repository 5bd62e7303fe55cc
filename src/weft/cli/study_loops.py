"""The loop study of ``weft study``: its options, its measurement, its tables and its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weft.cli import ending, output, progress
from weft.cli.busy import warn_if_busy

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = ("programs", "languages")
FILE = "loops.json"
PRIORITIES = {"from": 2, "L2 sim.": 1}  # columns that a narrow terminal leaves out
PARTIAL = "rows"  # a stopped study is saved if it has this field


def format_number() -> int:
    """Return the format of the records that this version reads."""
    from weft.lab.loops.run import FORMAT

    return FORMAT


def measure(device: str | None, options: Mapping[str, str | None], quick: bool) -> dict[str, Any]:
    """Run the study; ``options`` are the texts of ``OPTIONS``. Raises :class:`WeftError` for bad ones."""
    from weft.core import WeftError
    from weft.lab.loops import run
    from weft.lab.loops.variants import parse_languages, parse_programs

    if device not in (None, "cpu"):
        raise WeftError("--device", expected="cpu: the loop study runs on the CPU", got=device)
    sizes, languages = parse_programs(options["programs"], quick), parse_languages(options["languages"])
    warn_if_busy("cpu")
    with progress.Progress(every_line=True) as status:
        if options["programs"] is None:
            seconds = run.EXPECTED_QUICK_SECONDS if quick else run.EXPECTED_SECONDS
            status.announce(seconds, ending.count_text(len(sizes), "program"))
        return run.run(sizes, languages, quick=quick, log=status)


def plot_all(record: Mapping[str, Any], out: Path) -> list[Path]:
    """Draw the picture into a folder."""
    from weft.lab.loops.report import plot_all

    return plot_all(record, out)


def show(record: dict[str, Any]) -> None:
    """Print two tables for each program, the sentences and the faults."""
    from dataclasses import replace

    from weft.core.table import plain_table
    from weft.lab.loops import report

    for program in record["programs"]:
        columns, rows = report.program_table(record, program)
        measured = plain_table(columns, rows, numeric=columns[2:], priorities=PRIORITIES)
        output.show_table(replace(measured, title=report.title(program)))
        print()
        columns, rows = report.change_table(record, program)
        output.show_table(plain_table(columns, rows, fold=12))
        print()
    output.show_notes(report.sentences(record), style="")
    output.show_notes([f"wrong: {line}" for line in record["wrong"]], style="red")


def verdict(record: Mapping[str, Any], ending_text: str, stopped: bool) -> str:
    """Return the last line: the faults, the number of variants, and how many could not run."""
    from weft.lab.loops import report

    timed = [r for r in record["rows"] if r["us"] is not None]
    missing = report.not_run(record)
    left_out = f"; not run: {ending.count_text(missing, 'variant')}" if missing else ""
    if not record["wrong"] and not timed:
        return f"nothing timed {ending_text}{left_out}"
    text = f"{ending.count_text(len(timed), 'loop nest')} timed on the CPU {ending_text}{left_out}"
    if record["wrong"]:
        return f"wrong: {ending.count_text(len(record['wrong']), 'variant')}, not timed; {text}"
    if stopped:
        rounds = min(r["samples"] for r in timed)
        return f"stopped after {ending.count_text(rounds, 'round')}; {text}"
    return f"good: {text}"
