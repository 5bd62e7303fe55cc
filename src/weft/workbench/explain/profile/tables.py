"""Markdown tables of committed profiles for the documentation: ``results/<device>/profile.ndjson``.

Each line of a file is the output of ``weft profile --json``. cog calls these functions from the root of a
checkout, so the tables must not depend on the day or the machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core import WeftError
from weft.workbench.report.markdown import RESULTS, table
from weft.workbench.report.scales import NONE, time

FILE = "profile.ndjson"
FORMAT = "weft profile 1"
COMMAND = (
    "weft profile matmul --impl torch --case bf16-8192x8192x8192 --json >> results/<device>/profile.ndjson"
)


def load(path: Path) -> list[dict[str, Any]]:
    """Load a file's profiles, the last of each call; raises :class:`WeftError` for any other line."""
    profiles: dict[tuple[str, ...], dict[str, Any]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            profile = json.loads(line)
            if profile["format"] != FORMAT:
                raise ValueError(f"format {profile['format']!r}")
            key = tuple(profile[k] for k in ("operator", "implementation", "case", "direction"))
        except (ValueError, KeyError, TypeError) as error:
            raise WeftError(f"{path}:{number}", expected=f"a line of {FORMAT}", got=repr(error)) from error
        profiles[key] = profile
    return list(profiles.values())


def measured(results: Path = RESULTS) -> str:
    """Return one table a device with the three instruments side by side, or the command to measure."""
    sections = [
        f"{_caption(profiles[-1]['machine'])}\n\n{_table(profiles)}"
        for file in sorted(results.glob(f"*/{FILE}"))
        if (profiles := load(file))
    ]
    return "\n".join(sections) if sections else f"not measured yet: `{COMMAND}`\n"


def _caption(machine: Mapping[str, Any]) -> str:
    commit = str(machine.get("commit") or "unknown")[:10]
    torch = (machine.get("versions") or {}).get("torch")
    device = [f"**{machine.get('device', 'unknown device')}**", str(machine.get("date", ""))[:10]]
    return ", ".join(filter(None, [*device, f"commit {commit}", f"torch {torch}"])) + "."


def _table(profiles: Sequence[Mapping[str, Any]]) -> str:
    names = [instrument["instrument"] for instrument in profiles[0]["instruments"]]
    head = ("call", *names, "differ by", "root", "wall time", "root off by")
    rows = []
    for profile in profiles:
        agreement, root = profile["agreement"], profile["root"]
        direction = "" if profile["direction"] == "forward" else f" {profile['direction']}"
        spread = NONE if agreement["spread"] is None else f"{agreement['spread']:.1%}"
        rows.append(
            [
                f"{profile['operator']} {profile['implementation']} `{profile['case']}`{direction}",
                *(time(i["us"]) for i in profile["instruments"]),
                spread if agreement["good"] else f"**{spread}**",
                time(root["root_us"]),
                time(root["wall_us"]),
                f"{root['gap']:+.2%}" if root["good"] else f"**{root['gap']:+.2%}**",
            ]
        )
    note = "In bold: beyond what is allowed, 5 % from 1 ms a call on, and 2 % of the root."
    return table(head, rows, " " + "r" * (len(head) - 1)) + f"\n{note}\n"
