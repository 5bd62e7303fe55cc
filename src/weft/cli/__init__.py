"""The command line: one file a command, thin: parse, call, print.

Data goes to stdout, talk and progress to stderr. Exit 0: good; 1: a verdict went against you; 2:
the call was wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from weft import __version__
from weft.core.errors import WeftError

# In the order of the help: look, judge, time, look inside, ship.
COMMANDS = (
    *("device", "ops", "check", "bench", "compare", "report", "profile", "inspect"),
    *("judge", "new", "selftest", "demo", "study", "tune"),
    *("data", "train", "generate"),
)


class _Built(Mapping[str, Any]):
    """The commands by name, each built when it is asked for: building all takes longer than Python
    takes to start."""

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        function, summary, epilog = _parts(name)
        alone = typer.Typer(add_completion=False, **STYLE)
        alone.command(name, short_help=summary, epilog=epilog)(function)
        return typer.main.get_command(alone)


class _Group(typer.core.TyperGroup):
    """``weft``: its help needs the commands' first sentences alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Any = _Built()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _parts(name)[1]) for name in COMMANDS])


def _parts(name: str) -> tuple[Callable[..., None], str, str | None]:
    """A command's function, the first sentence of its docstring, and what its help ends with."""
    module = import_module(f"weft.cli.{name}")
    function = getattr(module, name)
    summary = " ".join((function.__doc__ or "").partition("\n\n")[0].split())
    return function, summary, getattr(module, "EPILOG", None)


STYLE: Any = {
    "rich_markup_mode": None,  # plain help: drawing it with rich takes a third of its time
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(
    name="weft",
    cls=_Group,
    help="Is a GPU kernel right, how fast is it, and how far is it from the machine's limit?",
    epilog="Start with: weft bench",
    no_args_is_help=True,
    **STYLE,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Is a GPU kernel right, how fast is it, and how far is it from the machine's limit?"""


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    try:
        app()
    except WeftError as error:
        message, _, hint = str(error).partition("; hint: ")
        print(f"error: {message}", file=sys.stderr)
        if hint:
            print(f"hint: {hint}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # `weft ops | head` closed the pipe: not an error of ours, and nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
