"""``weft judge FOLDER --candidates FOLDER``: run a suite, with progress, and print table and score."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from weft.cli import ending, output
from weft.cli.progress import stoppable
from weft.core.text import printable

if TYPE_CHECKING:
    from weft.core.table import Table
    from weft.workbench.judge.suite import Suite, SuiteOptions

FOLD = 16  # characters to which names are folded at least
MARKS = {"correct": "correct", "wrong": "WRONG", "not run": "not run", "no candidate": "-"}
REASON_COLUMNS = 160
Row = Mapping[str, Any]


def judge_suite(
    problems: Path,
    candidates: Path,
    options: SuiteOptions,
    save: Path | None,
    resume: bool,
    *,
    as_json: bool,
    as_csv: bool,
) -> NoReturn:
    """Judge all candidates, print the results and the score, and exit with the command's code."""
    from weft.workbench.judge import suite

    pairs = suite.find_pairs(problems, candidates)
    done = suite.read_done(save, pairs, options) if resume and save is not None else {}
    if done:
        output.log(f"{len(done)} of {len(pairs)} are in {save} already and are not judged again")
    running = suite.Suite([p for p in pairs if p.name not in done], options)
    rows, watch = dict(done), ending.Stopwatch()
    # closing: the generator ends its processes here, also where the signal arrives outside of it.
    with (
        stoppable() as stop,
        _progress(running, len(done), len(pairs)) as report,
        closing(iter(running)) as judged_rows,
    ):
        for row in judged_rows:
            rows[row["problem"]] = row
            if save is not None and suite.status_of(row) != suite.NO_CANDIDATE:
                suite.append(save, row)
            report(row)
    ordered = [rows[p.name] for p in pairs if p.name in rows]
    score = suite.score(ordered)
    if as_json:
        print(json.dumps({"score": score, "complete": not stop, "results": ordered} | stop.to_json()))
    elif as_csv:
        output.print_csv(_table(ordered))
    else:
        _show(ordered, score)
    counts = ", ".join(f"{n} {status}" for status, n in score["counts"].items() if n)
    judged = [s for r in ordered if (s := suite.status_of(r)) != suite.NO_CANDIDATE]
    good = all(s == suite.CORRECT for s in judged)
    if stop:
        hint = f"; go on with --save {save} --resume" if save else "; with --save FILE it can be resumed"
        line = f"stopped after {len(ordered)} of {len(pairs)} problems"
        line += f": {counts or 'none judged'} ({watch}){hint}"
    else:
        line = f"{'passed' if good else 'failed'}: {counts} of {len(pairs)} problems ({watch})"
    ending.print_verdict(line, to_stderr=as_json or as_csv)
    raise typer.Exit(stop.exit_code or (0 if good else 1))


@contextmanager
def _progress(running: Suite, done: int, total: int) -> Iterator[Any]:
    """Show a progress bar on a terminal's stderr, or print a line for each result in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    began, count = time.monotonic(), done
    if not console.is_terminal:

        def log_row(row: Row) -> None:
            nonlocal count
            count += 1
            output.log(f"[{count}/{total}] {_line(row)}")

        yield log_row
        return
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, completed=done)

        def advance(row: Row) -> None:
            bar.console.print(_line(row), markup=False, soft_wrap=True)
            left = total - bar.tasks[0].completed - 1
            each = (time.monotonic() - began) / max(bar.tasks[0].completed + 1 - done, 1)
            states = ", ".join(f"{name} {state}" for name, state in running.activity()[:2])
            bar.update(task, advance=1, description=f"about {left * each:.0f} s left  {states}")

        yield advance


def _line(row: Row) -> str:
    """Describe one result in a line."""
    from weft.workbench.judge.suite import status_of

    status = MARKS[status_of(row)]
    shown = row["speedup"] and row.get("difference_shown")
    text = ending.speed_text(row["speedup"]) if shown else "no difference shown"
    speed = f", {text}" if row["speedup"] else ""
    reason = f": {row['reason'][:REASON_COLUMNS]}" if row["reason"] not in ("", "no candidate") else ""
    return printable(f"{row['problem']}: {status} ({row['seconds']:.1f} s{speed}){reason}")


def _speedup(row: Row) -> str:
    return f"{row['speedup']:.2f}x" if row["speedup"] else "-"


def _table(rows: Sequence[Row]) -> Table:
    """Return a row for each candidate."""
    from weft.core.table import plain_table
    from weft.workbench.judge.suite import status_of

    columns = ("problem", "verdict", "own check", "speedup", "seconds", "failed")
    cells = []
    for row in rows:
        own = (row.get("own_check") or {}).get("passed")
        cells.append(
            (
                row["problem"],
                MARKS[status_of(row)],
                "-" if own is None else "accepts" if own else "rejects",
                _speedup(row),
                f"{row['seconds']:.1f}",
                row["reason"].partition(": ")[0] if row["reason"] != "no candidate" else "",
            )
        )
    priorities = {"own check": 1, "seconds": 2, "failed": 3}
    numeric = ("speedup", "seconds")
    return plain_table(columns, cells, numeric=numeric, priorities=priorities, fold=FOLD)


def _show(rows: Sequence[Row], score: Mapping[str, Any]) -> None:
    """Print a row for each candidate, then counts, fast_p and the mean speedup."""
    output.show_table(_table(rows), options=("json", "csv"))
    counts = ", ".join(f"{n} {status}" for status, n in score["counts"].items() if n)
    print(f"\n{score['problems']} problems: {counts or 'none judged'}")
    fast = ", ".join(f"fast_{p} {share:.1%}" for p, share in score["fast_p"].items())
    print(f"{fast} (share of all that are correct and faster than p times the reference)")
    print(f"the problems' own checks would accept {score['own_check_accepts']}")
    if score["speedup"]:
        print(f"geometric mean speedup of {score['timed']} timed: {score['speedup']:.2f}x")
