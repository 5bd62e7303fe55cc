"""The command line: one file a command, thin: parse, call, print.

Data goes to stdout, talk and progress to stderr. Exit 0: good; 1: a verdict went against you; 2:
the call was wrong.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated

import typer

from weft import __version__
from weft.core.errors import WeftError

COMMANDS = (
    *("device", "ops", "check", "bench", "judge", "new", "selftest", "compare", "report"),
    "study",
    "inspect",
    "profile",
    "demo",
)

app = typer.Typer(
    name="weft",
    help="Is a GPU kernel right, how fast is it, and how far is it from the machine's limit?",
    epilog="Start with: weft bench",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: drawing it with rich takes a third of its time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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


for _name in COMMANDS:
    _module = import_module(f"weft.cli.{_name}")
    _function = getattr(_module, _name)
    _summary = " ".join((_function.__doc__ or "").partition("\n\n")[0].split())
    _epilog = getattr(_module, "EPILOG", None)
    app.command(_name, short_help=_summary, epilog=_epilog)(_function)


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
