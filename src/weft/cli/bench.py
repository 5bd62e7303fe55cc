"""``weft bench``: which of the ways is right, how fast each is, and how far from the limit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.options import MEMORY, SECONDS, Files, Memory, Names, Seconds, limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from weft.core import Record

EPILOG = "What each number means, and what it cannot see: docs/timing.md"
PATIENCE = 30.0  # seconds after which the default set begins no further backward


def bench(
    operators: Annotated[
        Names, typer.Argument(help="Operators; by default four.", show_default=False)
    ] = None,
    impl: Annotated[
        Names, typer.Option("--impl", help="An implementation (repeatable); 'cuda' has its steps.")
    ] = None,
    case: Annotated[Names, typer.Option("--case", help="A case by name (repeatable).")] = None,
    direction: Annotated[
        Names, typer.Option("--direction", help="forward or backward; by default both.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cuda or cpu; by default a GPU if there is one.")
    ] = None,
    all_cases: Annotated[
        bool, typer.Option("--all-cases", help="Every bench case, not each operator's first.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="Append records to this JSON-lines file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of records.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter, with wider intervals.")] = False,
    files: Files = None,
    seconds: Seconds = SECONDS,
    memory: Memory = MEMORY,
) -> None:
    """Check each implementation, then time those that passed, side by side.

    With nothing named: gelu, softmax, sum and matmul at their first case, forward and then, while
    quick, backward. --all-cases alone: every case of every operator.

    Exit 0: all good; 1: something is wrong, suspect or could not be timed; 2: the call was wrong.

    Example: weft bench softmax --with mine.py --save records.jsonl
    """
    from weft.core import registry
    from weft.workbench.bench import went_against
    from weft.workbench.strangers import Strangers, Unreadable

    named = bool(operators or case or direction or all_cases)
    if not (operators or case or all_cases or files):
        operators = list(registry.FIRST_LOOK)
    asked = {"operators": operators, "impls": impl, "cases": case, "directions": direction}
    more = {"all_cases": all_cases, "quick": quick, "patience": None if named else PATIENCE}
    try:
        with Strangers(files or [], limits(seconds, memory)) as strangers:
            done = _run(device, save, as_json, strangers.beside(asked) | more)
    except Unreadable as error:
        print(f"failed: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps([r.to_json() for r in done]))
    else:
        from weft.workbench import table

        table.console().print(table.footnote(done), style="dim")
    if went_against(done):
        raise typer.Exit(1)


def _run(
    device: str | None, save: Path | None, as_json: bool, asked: dict[str, Any]
) -> list[Record]:
    """All records, each point's saved and shown when it is done."""
    from weft.core import WeftError
    from weft.machine.query import known_kind
    from weft.workbench import bench as workbench

    kind = known_kind(device)
    if save is not None and save.is_dir():
        raise WeftError("--save", expected="a file", got=f"the folder {save}")
    with _Progress() as say:
        points = workbench.run_points(device=kind, on_event=say, **asked)
        done = list(_shown(points, save, as_json, say.clear))
    if not done:
        raise WeftError(
            "nothing to bench",
            expected=f"an operator with a bench case for {kind}",
            got="none",
            hint="see weft ops, or name a --case",
        )
    return done


def _shown(
    points: Iterator[list[Record]], save: Path | None, as_json: bool, clear: Callable[[], None]
) -> Iterator[Record]:
    """Each point's records saved and shown as soon as it is done, so that nothing is lost."""
    from weft.core.record import append

    for group in points:
        if save is not None:
            append(save, group)
        clear()
        if not as_json:
            _show(group)
        yield from group


def _show(group: Sequence[Record]) -> None:
    from weft.workbench import table

    out = table.console()
    out.print(table.render(group, plain=not out.is_terminal))
    sys.stdout.flush()


class _Progress:
    """One line on a terminal's stderr, rewritten as work goes on; in a pipe, nothing but the
    steps that take long."""

    def __enter__(self) -> _Progress:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)
        self.live = self.console.is_terminal
        self.status = self.console.status("") if self.live else None
        if self.status:
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, line: str) -> None:
        if self.status and line.startswith("left out"):
            self.console.print(line)
        elif self.status:
            self.status.update(line)
            self.status.start()
        elif "round" not in line:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away, so that a table can be printed."""
        if self.status:
            self.status.stop()
