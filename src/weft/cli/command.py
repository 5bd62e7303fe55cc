"""``WeftCommand``: help with groups of options, one style of defaults, completion, and usage errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
import typer.core

from weft.cli import completion
from weft.core.errors import WeftError
from weft.core.output_files import require_writable

# Click's base of all usage errors. Newer releases of Typer contain their own copy of click.
UsageError: Any = typer.BadParameter.__bases__[0]

# Groups of options in help pages, in the order shown. An option that means something else in one command has
# that command in front. An option that is not here is shown under "Options".
GROUPS = {
    "Selection": (
        *("--operator", "--impl", "--case", "--direction", "--device", "--all-cases", "--seed", "--backend"),
        *("--kernel", "--arch", "--all", "--row", "--mutant", "--without", "--commits", "--tool", "--diff"),
        *("--candidates", "--workloads", "--backward", "judge --resume", "--points", "--from"),
        *("--program", "--line"),
    ),
    "Model": ("--preset", "--layers", "--heads", "--width", "--start", "--dropout", "--length"),
    "Data": ("--data", "--tokeniser", "--bpe-files", "--prompt"),
    "Optimisation": (
        *("--steps", "--batch", "--accumulate", "--lr", "--warmup"),
        *("--networks", "--rewind", "--share", "--rounds"),
    ),
    "Execution": ("--ops", "--compile", "--no-compile", "--dtype", "--strategy", "--set", "--profile"),
    "Checkpoints": ("--resume", "--checkpoint-every", "--keep", "--validate-every", "--sample-every"),
    "Your code": ("--with", "--seconds", "--memory", "--sanitize"),
    "Measurement": (
        *(
            "--quick",
            "--thorough",
            "--minutes",
            "--audit",
            "--measure",
            "--hierarchy",
            "--wait",
            "--active",
            "--repeat",
            "--no-time",
        ),
        *("--threshold", "--fail-on", "--noise", "--measure-noise", "--pairs", "--jobs", "--honest"),
        *("profile --warmup", "profile --stacks", "bench --batch-invariant"),
    ),
    "Options": ("study --steps",),
    "Output": (
        *(
            "--save",
            "--out",
            "--nonce",
            "--output",
            "--title",
            "--html",
            "--picture",
            "--no-pictures",
            "--markdown",
        ),
        *("--source", "--ptx", "--explain", "--sass", "--list", "--show", "--json", "--csv", "--help"),
    ),
}
WRITTEN_FILES = {"--save", "--html", "--picture"}  # options that name a file to write, in every command
INVALID = re.compile(r"'(.*)' is not (a valid .*)")
UNGROUPED = 7  # options up to which a help page is clearer without groups


class WeftCommand(typer.core.TyperCommand):
    """A command whose help page has groups of options and verbatim examples, and whose names complete.

    A default is shown as ``[default: X]``, whether the option's help text states it or its value does.
    The epilog is printed as it is written.
    """

    def __init__(self, name: str | None, **options: Any) -> None:
        super().__init__(name, **options)
        for param in self.params:
            state_default(param)
            if completer := _completer(str(name), param):
                param._custom_shell_complete = completer

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            parsed: list[str] = super().parse_args(ctx, args)
        except UsageError as error:
            error.ctx = error.ctx or ctx  # the parser names no command
            raise
        return parsed

    def invoke(self, ctx: Any) -> Any:
        # Before the command starts: a result that cannot be saved is known before long work, not after it.
        for param in self.params:
            path = ctx.params.get(param.name)
            if WRITTEN_FILES & {*param.opts} and isinstance(path, Path):
                require_writable(path, param.opts[0])
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        params = [p for p in self.get_params(ctx) if not getattr(p, "hidden", False)]
        arguments = [_argument_row(p) for p in params if p.param_type_name == "argument"]
        options = [p for p in params if p.param_type_name == "option"]
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        for param in options:
            group = _group(str(self.name), param) if len(options) > UNGROUPED else "Options"
            groups[group].append(_option_row(param, ctx))
        for title, rows in {"Arguments": arguments, **groups}.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            formatter.write(f"\n{self.epilog}\n")


def state_default(param: Any) -> None:
    """Append ``[default: X]`` to the help text of an option whose default is a value."""
    default = param.default
    if default is None or default is False or not param.show_default:
        return
    if isinstance(default, float):
        default = f"{default:g}"
    if str(default):
        param.help = f"{param.help or ''} [default: {default}]".strip()
    param.show_default = False


def _argument_row(param: Any) -> tuple[str, str]:
    required = " [required]" if param.required else ""
    return param.metavar or param.name.upper(), f"{param.help or ''}{required}"


def _option_row(param: Any, ctx: Any) -> tuple[str, str]:
    """Return an option's names and help text, without the full stop that only Typer's own texts have."""
    names, text = param.get_help_record(ctx)
    return names, text.replace("  [", " [").replace("[x>=", "[at least ").removesuffix(".")


def _group(command: str, param: Any) -> str:
    for options in ({f"{command} {o}" for o in param.opts}, {*param.opts}):
        for group, names in GROUPS.items():
            if options & {*names}:
                return group
    return "Options"


def _completer(command: str, param: Any) -> Callable[..., list[Any]] | None:
    """Return the completion of a parameter: from a metavar such as ``cpu|cuda``, else by its name."""
    metavar = str(param.metavar or "")
    if "|" in metavar:
        return lambda ctx, param, incomplete: [c for c in metavar.split("|") if c.startswith(incomplete)]
    names = (f"{command} {param.opts[-1]}", f"{command} {metavar}", param.opts[-1], metavar)
    return next((completion.COMPLETERS[n] for n in names if n in completion.COMPLETERS), None)


def usage_error(error: Any) -> WeftError:
    """Return the error of a wrong call in the form of all others: expected, got, hint."""
    path = error.ctx.command_path if error.ctx is not None else ""
    # The program is called weft, also where Python runs it as a module.
    command = f"weft {path.rpartition('weft')[2].strip()}".strip()
    help_hint = f"{command} --help shows the arguments and options"
    param = getattr(error, "param", None)
    option = getattr(error, "option_name", None)
    message = error.message.rstrip(".")
    if hasattr(error, "possibilities"):  # an unknown option
        near = ", ".join(sorted(error.possibilities or ()))
        hint = f"did you mean {near}?" if near else help_hint
        return WeftError(f"unknown option of {command}", got=option, hint=hint)
    if option is not None and "requires" in message:
        return WeftError(f"{command}: {option}", expected="a value", got="none", hint=help_hint)
    if param is not None:
        name = param.opts[0] if param.param_type_name == "option" else param.metavar or param.name.upper()
        if hasattr(error, "param_type"):  # a missing argument or option
            return WeftError(command, expected=name, got="none", hint=help_hint)
        return WeftError(f"{command}: {name}", expected=_expected(message), got=_got(error), hint=help_hint)
    if message.startswith("Got unexpected extra argument"):
        extra = message.rpartition("(")[2].removesuffix(")")
        return WeftError(command, expected="no further argument", got=extra, hint=help_hint)
    return WeftError(f"{command}: {message[:1].lower()}{message[1:]}", hint=help_hint)


def _expected(message: str) -> str:
    """Return what a value must be, from the message of Typer's validation.

    >>> _expected("Input should be a valid integer, unable to parse string as an integer")
    'a valid integer'
    """
    invalid = INVALID.fullmatch(message)  # as click puts it in older releases
    return invalid[2] if invalid else message.removeprefix("Input should be ").partition(",")[0]


def _got(error: Any) -> str | None:
    invalid = INVALID.fullmatch(error.message.rstrip("."))
    if invalid:
        return str(invalid[1])
    errors = getattr(error.__cause__, "errors", None)
    return str(errors()[0]["input"]) if callable(errors) else None
