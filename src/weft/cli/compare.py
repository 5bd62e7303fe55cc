"""``weft compare A B``: what became faster, slower or stayed, from records alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.workbench.compare import Comparison

EPILOG = "How the verdicts come about: docs/timing.md"
COLUMNS = ("operator", "implementation", "case", "direction", "A", "B", "B / A", "noise", "verdict")
STYLES = {"faster": "green", "slower": "bold red", "ambiguous": "yellow", "same": ""}


def compare(
    a: Annotated[Path, typer.Argument(help="Records from before.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Records from after.", show_default=False)],
    threshold: Annotated[
        float | None,
        typer.Option(help="The least difference that counts, as a share: 0.02 is 2 %."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Compare records of unlike machines.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say faster, slower, same or ambiguous for everything measured in both files.

    Exit 0: nothing is slower or broken; 1: something is; 2: the call was wrong.

    Example: weft compare before.jsonl after.jsonl
    """
    from weft.core import WeftError, record
    from weft.workbench import compare as workbench

    if markdown and as_json:
        raise WeftError("one form at a time", expected="--json or --markdown", got="both")
    sides = []
    for path in (a, b):
        records, torn = record.read(path)
        if torn:
            print(f"{path}: {torn} torn line(s) passed over", file=sys.stderr)
        sides.append(records)
    found = workbench.compare(*sides, threshold=threshold, force=force)
    notes = workbench.differences(*sides)
    counts = workbench.counts(found)
    if as_json:
        answer = {"counts": counts, "differences": notes}
        print(json.dumps(answer | {"comparisons": [c.to_json() for c in found]}))
    elif markdown:
        print(_markdown(found))
    else:
        _print(found)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(", ".join(f"{n} {word}" for word, n in counts.items() if n), file=sys.stderr)
    if counts["slower"] or any(c.broken for c in found):
        raise typer.Exit(1)


def _cells(c: Comparison) -> list[str]:
    from weft.workbench.table import duration

    point = [c.operator, c.implementation, c.case, c.direction]
    if c.verdict is None or c.ratio is None or c.interval is None or c.noise is None:
        return [*point, duration(c.a), duration(c.b), "", "", c.reason]
    low, high = c.interval
    ratio = f"{c.ratio:.3f} ({low:.3f} to {high:.3f})"
    return [*point, duration(c.a), duration(c.b), ratio, f"{c.noise:.1%}", c.verdict]


def _markdown(found: Sequence[Comparison]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"

    rule = "| " + " | ".join("---" for _ in COLUMNS) + " |"
    return "\n".join([line(COLUMNS), rule, *(line(_cells(c)) for c in found)])


def _print(found: Sequence[Comparison]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from weft.workbench.table import console

    out = console()
    table = Table(box=box.SIMPLE_HEAD if out.is_terminal else None, pad_edge=False)
    for name in COLUMNS:
        right = name in ("A", "B", "B / A", "noise")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for c in found:
        style = "red" if c.broken else "dim" if c.verdict is None else STYLES[c.verdict]
        table.add_row(*map(escape, _cells(c)), style=style)
    out.print(table)
