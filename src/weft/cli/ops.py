"""``weft ops``: the operators, the ways each is written, and which of them run here."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer

EPILOG = "Example: weft ops --json"


def ops(
    json: Annotated[bool, typer.Option("--json", help="The list as JSON on stdout.")] = False,
) -> None:
    """List the operators and their implementations, and why one does not run here."""
    from weft import machine

    found = _list(machine.default_device())
    if json:
        typer.echo(jsonlib.dumps(found))
        return
    _show(found)


def _list(device: str) -> list[dict[str, Any]]:
    from weft.core import registry

    listed = []
    for name in registry.operator_names():
        operator = registry.operator(name)
        ways = [_way(operator, one, device) for one in registry.implementations(name)]
        listed.append({"operator": name, "summary": operator.summary, "implementations": ways})
    return listed


def _way(operator: Any, implementation: Any, device: str) -> dict[str, Any]:
    """It runs here if it does at one case at least; else the first refusal gives the reason."""
    from weft.backends import support

    answers = [support(implementation, c, device) for c in operator.select("check", device)]
    best = next((a for a in answers if a), answers[0] if answers else None)
    return {
        "name": implementation.name,
        "backend": implementation.backend,
        "supported": bool(best),
        "reason": best.reason if best is not None else f"no check case for {device}",
        "idea": implementation.idea,
    }


def _show(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    for operator in found:
        console.print(f"[bold]{operator['operator']}[/]  {escape(operator['summary'])}")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        for way in operator["implementations"]:
            word = "runs" if way["supported"] and not way["reason"] else "check only"
            word = word if way["supported"] else "no"
            table.add_row(way["name"], word, escape(way["reason"] or way["idea"]))
        console.print(table)
