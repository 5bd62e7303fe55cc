"""Figures for docs from committed profiles: ``results/<device>/profile.ndjson``, one a line.

Each line is what ``weft profile --json`` printed. Called by cog from the root of a checkout, so
nothing here may depend on the day or the machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core import WeftError
from weft.workbench.figures import RESULTS, table
from weft.workbench.report.scales import NONE, time

FILE = "profile.ndjson"
FORMAT = "weft profile 1"
COMMAND = (
    "weft profile matmul --impl torch --case bf16-8192x8192x8192 --json "
    ">> results/<device>/profile.ndjson"
)


def load(path: Path) -> list[dict[str, Any]]:
    """All profiles of a file, the last of each call; raises :class:`WeftError` for another line."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
            if one["format"] != FORMAT:
                raise ValueError(f"format {one['format']!r}")
            key = tuple(one[k] for k in ("operator", "implementation", "case", "direction"))
        except (ValueError, KeyError, TypeError) as error:
            told = f"{path}:{number}"
            raise WeftError(told, expected=f"a line of {FORMAT}", got=repr(error)) from error
        found[key] = one
    return list(found.values())


def measured(results: Path = RESULTS) -> str:
    """The three instruments side by side by device, or the command that would measure them."""
    parts = [
        f"{_caption(profiles[-1]['machine'])}\n\n{_table(profiles)}"
        for file in sorted(results.glob(f"*/{FILE}"))
        if (profiles := load(file))
    ]
    return "\n".join(parts) if parts else f"not measured yet: `{COMMAND}`\n"


def _caption(machine: Mapping[str, Any]) -> str:
    commit = str(machine.get("commit") or "unknown")[:10]
    torch = (machine.get("versions") or {}).get("torch")
    told = [f"**{machine.get('device', 'unknown device')}**", str(machine.get("date", ""))[:10]]
    return ", ".join(filter(None, [*told, f"commit {commit}", f"torch {torch}"])) + "."


def _table(profiles: Sequence[Mapping[str, Any]]) -> str:
    names = [one["instrument"] for one in profiles[0]["instruments"]]
    head = ("call", *names, "differ by", "root", "wall time", "root off by")
    rows = []
    for one in profiles:
        agreed, root = one["agreement"], one["root"]
        direction = "" if one["direction"] == "forward" else f" {one['direction']}"
        spread = NONE if agreed["spread"] is None else f"{agreed['spread']:.1%}"
        rows.append(
            [
                f"{one['operator']} {one['implementation']} `{one['case']}`{direction}",
                *(time(i["us"]) for i in one["instruments"]),
                spread if agreed["good"] else f"**{spread}**",
                time(root["root_us"]),
                time(root["wall_us"]),
                f"{root['gap']:+.2%}" if root["good"] else f"**{root['gap']:+.2%}**",
            ]
        )
    note = "In bold: beyond what is allowed, 5 % from 1 ms a call on, and 2 % of the root."
    return table(head, rows, " " + "r" * (len(head) - 1)) + f"\n{note}\n"
