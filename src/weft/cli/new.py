"""``weft new``: a file to start from, which passes its check as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.core import WeftError

EPILOG = "Example: weft new softmax --backend triton. What may stand in the file: docs/bring.md"


def new(
    operator: Annotated[
        str | None, typer.Argument(metavar="[OPERATOR]", help="One of Weft's: see weft ops.")
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="triton|cuda|numba|eager", help="What it is written in.")
    ] = "triton",
    own: Annotated[
        str | None,
        typer.Option("--operator", metavar="NAME", help="Instead: a whole operator of your own."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where to; by default OPERATOR_BACKEND.py or .cu here."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What it is called in tables; default BACKEND/mine."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file.")] = False,
) -> None:
    """Write a working, commented file to start a kernel from: right, and not tuned.

    The file's path goes to stdout, what to run next to stderr.
    """
    from weft.workbench import starters

    if (operator is None) == (own is None):
        raise WeftError(
            "weft new",
            expected="an OPERATOR of Weft's, or --operator NAME for one of your own",
            got="both" if operator else "neither",
            hint="weft new softmax --backend triton",
        )
    written_in = backend if operator else None
    target = Path(out or starters.file_name(operator or own or "", written_in))
    if target.suffix != starters.ending(backend if operator else "triton"):
        expected = f"a file that ends in {starters.ending(backend if operator else 'triton')}"
        raise WeftError("--out", expected=expected, got=str(target))
    if operator:
        called = {"name": name or f"{backend}/mine", "file": str(target)}
        text = starters.starter(operator, backend, **called)
    else:
        called = {"name": name or "triton/mine", "file": str(target)}
        text = starters.own_operator(own or "", **called)
    _write(target, text, force)
    typer.echo(str(target))
    what = f" {operator}" if operator else ""
    typer.echo(
        "It is right, and not tuned. Next:\n"
        f"  weft check{what} --with {target}    is it right, at every case\n"
        f"  weft bench{what} --with {target}    how fast, and how far from the limit",
        err=True,
    )


def _write(target: Path, text: str, force: bool) -> None:
    """Raises :class:`WeftError` where the file is there already, or cannot be written."""
    try:
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise WeftError(
            f"{target} is there already", hint="--force writes over it, --out names another"
        ) from error
    except OSError as error:
        raise WeftError(f"{target} cannot be written", got=error.strerror) from error
