"""``weft new``: a file to start from, which passes its check as it stands; or a whole project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.core import WeftError

EPILOG = (
    "Examples: weft new softmax --backend triton (docs/bring.md says what may stand in the file); "
    "weft new --extension tiles (docs/extension.md)"
)


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
    extension: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Instead: a project that ships a PyTorch extension."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Where to; by default OPERATOR_BACKEND.py, .cu or NAME."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What it is called in tables; default BACKEND/mine."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over what is there.")] = False,
) -> None:
    """Write a working, commented file to start a kernel from: right, and not tuned.

    With --extension: a folder with a PyTorch extension in CUDA, built in four ways.

    The path goes to stdout, what to run next to stderr.
    """
    _one_of(operator, own, extension)
    if extension is not None:
        _extension(extension, Path(out or extension), name, force)
        return
    from weft.workbench import starters

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


def _one_of(operator: str | None, own: str | None, extension: str | None) -> None:
    """Raises :class:`WeftError` unless exactly one of the three was asked for."""
    given = {"OPERATOR": operator, "--operator": own, "--extension": extension}
    named = [option for option, value in given.items() if value is not None]
    if len(named) != 1:
        raise WeftError(
            "weft new",
            expected="an OPERATOR of Weft's, --operator NAME or --extension NAME",
            got=f"both {' and '.join(named)}" if named else "neither",
            hint="weft new softmax --backend triton",
        )


def _extension(extension: str, folder: Path, name: str | None, force: bool) -> None:
    """Write the project; raises :class:`WeftError` for a name or a folder that cannot be."""
    from weft.workbench.extension import write

    if name is not None:
        hint = f"weft new --extension {name}"
        raise WeftError("--name names an implementation, not an extension", hint=hint)
    write(extension, folder, force=force)
    typer.echo(str(folder))
    typer.echo(
        "relu, add and matmul, to be replaced by yours. Next:\n"
        f"  cd {folder}\n"
        "  python build_all.py                         build it in four ways, compare the bits\n"
        "  pip install --no-build-isolation . && python -m pytest\n"
        "  README.md                                   when to choose which way",
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
