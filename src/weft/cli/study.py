"""``weft study``: a whole program timed over its sizes, fitted, and held to the roofline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from weft.workbench.study.sizes import Sizes
    from weft.workbench.study.words import Table

EPILOG = "What is measured, how it is fitted, and what to see: docs/study.md"
STUDIES = ("mlp",)
LISTS = "A list, 1,2,4; what stands still while another varies stands at its middle."


def study(
    what: Annotated[str, typer.Argument(help="What is studied: mlp.")],
    device: Annotated[
        str | None, typer.Option("--device", help="cuda or cpu; by default a GPU if there is one.")
    ] = None,
    depths: Annotated[str | None, typer.Option(help=f"Layers. {LISTS}")] = None,
    widths: Annotated[str | None, typer.Option(help="Widths of a layer, a list.")] = None,
    batches: Annotated[str | None, typer.Option(help="Batches, a list.")] = None,
    steps: Annotated[str | None, typer.Option(help="Training steps in a row, a list.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Where record and pictures go.")
    ] = Path("study-mlp"),
    redraw: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure nothing: draw this record's pictures anew."),
    ] = None,
    no_pictures: Annotated[
        bool, typer.Option("--no-pictures", help="The record alone, with no matplotlib.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, in seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record.")] = False,
) -> None:
    """Time an MLP over steps, layers, width and batch: how does it scale, and what bounds it?

    Writes study.json and five pictures. Exit 0: good; 1: a loss, a FLOP count or a time is wrong;
    2: the call was wrong.

    Example: weft study mlp --device cpu --quick --out study
    """
    from weft.core import WeftError

    if what not in STUDIES:
        raise WeftError("a study", expected=" or ".join(STUDIES), got=what)
    if out.exists() and not out.is_dir():
        raise WeftError("--out", expected="a folder", got=f"the file {out}")
    if not no_pictures:
        _needs_matplotlib()
    if redraw is not None:
        found = _read(redraw)
    else:
        lists = {"depths": depths, "widths": widths, "batches": batches, "steps": steps}
        found = _measure(device, dtype, lists, quick)
        out.mkdir(parents=True, exist_ok=True)
        (out / "study.json").write_text(json.dumps(found, indent=1) + "\n")
    if not no_pictures:
        from weft.workbench.study.drawn import pictures

        for path in pictures(found, out):
            _say(f"drawn: {path}")
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)
    if found["wrong"]:
        raise typer.Exit(1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _needs_matplotlib() -> None:
    """Known before minutes are spent."""
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

    from weft.machine import known_kind
    from weft.workbench.study import mlp, sizes

    kind = known_kind(device)
    asked: dict[str, Any] = {w: _numbers(w, text) for w, text in lists.items() if text is not None}
    chosen: Sizes = replace(sizes.default(kind, quick, dtype), **asked)
    return mlp.run(kind, chosen, quick=quick, say=_say)


def _numbers(word: str, text: str) -> tuple[int, ...]:
    from weft.core import WeftError

    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise WeftError(f"--{word}", expected="whole numbers, as in 1,2,4", got=text) from error


def _read(path: Path) -> dict[str, Any]:
    from weft.core import WeftError
    from weft.workbench.study.mlp import FORMAT

    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeftError("--redraw", expected="a study.json", got=f"{path}: {error}") from error
    if not isinstance(found, dict) or (found.get("study"), found.get("format")) != ("mlp", FORMAT):
        raise WeftError("--redraw", expected=f"a study of the mlp in format {FORMAT}", got=path)
    return found


def _show(found: dict[str, Any]) -> None:
    from weft.workbench.study import words

    for made in (words.scaling, words.shares, words.turning):
        _table(made(found))
    for line in words.sentences(found):
        print(line)
    for line in found["wrong"]:
        print(f"wrong: {line}")


def _table(made: Table) -> None:
    from rich.markup import escape
    from rich.table import Table as Rich

    from weft.workbench import table

    head, rows = made
    drawn = Rich(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(head):
        drawn.add_column(column, no_wrap=number < 2)
    for row in rows:
        drawn.add_row(*map(escape, row))
    out = table.console()
    out.print(drawn)
    out.print()
