"""The command line: one module for each command, which parses, calls and prints.

Data goes to stdout, log lines and progress to stderr. Exit 0: good; 1: something failed or got
slower; 2: invalid arguments.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from weft import __version__
from weft.core.errors import WeftError, print_error

# In the order of the help.
COMMANDS = (
    *("device", "ops", "check", "bench", "compare", "report", "profile", "inspect"),
    *("debug", "hardware", "claim", "claims"),
    *("judge", "new", "selftest", "demo", "ladder", "study", "prune", "tune", "learn"),
    *("data", "train", "generate", "help"),
)


class _LazyCommands(Mapping[str, Any]):
    """The commands by name, each built at its first use: building all takes longer than Python's start."""

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        function, summary, epilog = _load(name)
        single = typer.Typer(add_completion=False, **STYLE)
        # Imported here: `weft --help` builds no command.
        from weft.cli.command import WeftCommand

        single.command(name, cls=WeftCommand, short_help=summary, epilog=epilog)(function)
        return typer.main.get_command(single)


class _Group(typer.core.TyperGroup):
    """The group ``weft``: its help reads the first sentence of each command and builds none of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Any = _LazyCommands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _load(name)[1]) for name in COMMANDS])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # With resilient_parsing a shell completes the line: an unfinished name is no error then.
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            from weft.core.operator import unknown_name

            raise unknown_name("command", args[0], list(COMMANDS))
        return super().resolve_command(ctx, args)


def _load(name: str) -> tuple[Callable[..., None], str, str | None]:
    """Return a command's function, the first paragraph of its docstring, and its epilog."""
    module = import_module(f"weft.cli.{name}")
    function = getattr(module, name)
    summary = " ".join((function.__doc__ or "").partition("\n\n")[0].split())
    return function, summary, getattr(module, "EPILOG", None)


HELP = "Is a GPU kernel correct, how fast is it, and how far is it from the machine's limit?"
STYLE: Any = {
    "rich_markup_mode": None,  # plain help: rendering it by rich takes a third of its time
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(
    name="weft",
    cls=_Group,
    help=HELP,
    epilog="Start with: weft bench. Pages of the documentation: weft help",
    no_args_is_help=True,
    **STYLE,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    """Declare the options of ``weft`` itself; ``HELP`` is its help."""


def main() -> None:
    """Run the command line. A wrong call is one line on stderr, with its hint, and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except WeftError as error:
        print_error(error)
        code = 2
    except typer.Abort:  # Ctrl-C, in releases of Typer that do not exit by themselves
        code = 130
    except BrokenPipeError:
        # `weft ops | head` closed the pipe. Python's flush at exit must not raise again: redirect it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except OSError as error:  # a full disk, a name that is too long, a folder without permission
        got = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print_error(WeftError("the system refused a file", got=got))
        code = 2
    except Exception as error:
        from weft.cli.command import UsageError, usage_error

        if not isinstance(error, UsageError):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # `weft` alone
            print(error.format_message(), file=sys.stderr)
        else:
            print_error(usage_error(error))
        code = 2
    _exit(code)


def _exit(code: int) -> None:
    """End the process with this code; where a GPU was used, without the destructors of its libraries.

    After a judgement with a profiler on an H200 they ended the process by ``free(): invalid pointer``
    (exit code -6), when its verdict was already out.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        sys.exit(code)
    # os._exit runs neither these functions nor the flushes.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe: nobody reads the rest
            stream.flush()
    os._exit(code if isinstance(code, int) else 0)
