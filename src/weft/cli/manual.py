"""Every command's help as Markdown, from the command line itself, for ``docs/commands.md``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer


def commands() -> str:
    """One section a command: what it does, how it is called, its arguments and options."""
    from weft.cli import COMMANDS, app

    group: Any = typer.main.get_command(app)
    return "\n".join(_section(name, group.commands[name]) for name in COMMANDS)


def _section(name: str, command: Any) -> str:
    """Read from the parameters, not from a printed screen, whose width is the terminal's."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name != "argument"]
    words = [_metavar(p) for p in arguments]
    usage = " ".join(["weft", name, *words, *(["[OPTIONS]"] if options else [])])
    parts = [f"## weft {name}", _prose(command.help), f"```\n{usage}\n```"]
    lines = [_line(_metavar(p), p.help, p) for p in arguments]
    lines += [_line(", ".join(_names(p)), p.help, p) for p in options if not p.hidden]
    if lines:
        parts.append("| argument or option | meaning |\n|---|---|\n" + "\n".join(lines))
    if command.epilog:
        parts.append(_prose(command.epilog))
    return "\n\n".join(p for p in parts if p) + "\n"


def _prose(text: str | None) -> str:
    """Help text as paragraphs; ``\\b`` marks are the terminal's business."""
    paragraphs = re.split(r"\n\s*\n", (text or "").replace("\b", "").strip())
    return "\n\n".join(" ".join(p.split()) for p in paragraphs)


def _metavar(parameter: Any) -> str:
    name = (parameter.metavar or parameter.human_readable_name).upper().strip("[].")
    name = f"{name}..." if parameter.nargs == -1 else name
    return str(name if parameter.required else f"[{name}]")


def _names(parameter: Any) -> list[str]:
    return [f"`{n}`" for n in (*parameter.opts, *parameter.secondary_opts)]


def _line(names: str, meaning: str | None, parameter: Any) -> str:
    told = _prose(meaning).replace("|", "\\|")
    default = parameter.default
    plain = isinstance(default, (str, int, float)) and not isinstance(default, bool)
    if (plain and str(default) and "efault" not in told) or isinstance(default, Path):
        told += f" Default: `{default}`."
    return f"| {names if names.startswith('`') else f'`{names}`'} | {told} |"
