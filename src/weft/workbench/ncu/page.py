"""Figures for docs from committed profiles: ``results/<device>/ncu.ndjson``, one report a line.

Not ``.jsonl``: every file of that name below ``results/`` holds a bench's records. Called by cog
from the root of a checkout, so nothing here may depend on the day or the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from weft.core import WeftError
from weft.workbench.figures import RESULTS, table
from weft.workbench.ncu.report import Report
from weft.workbench.ncu.rules import RULES
from weft.workbench.ncu.traffic import CLOSE
from weft.workbench.ncu.words import LINES
from weft.workbench.report.scales import NONE, time, unit

FILE = "ncu.ndjson"
COMMAND = (
    "weft profile softmax --tool ncu --impl cuda --case fp32-32768x4096 --json "
    ">> results/<device>/ncu.ndjson"
)


def load(path: Path) -> list[Report]:
    """All reports of a file, the last of each call; raises :class:`WeftError` for a torn line."""
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = Report.from_json(json.loads(line))
        except json.JSONDecodeError as error:
            raise WeftError(f"{path}:{number}: a torn line", got=str(error)) from error
        found[one.operator, one.implementation, one.case, one.direction] = one
    return list(found.values())


def measured(results: Path = RESULTS) -> str:
    """Predicted and counted bytes by device, or the command that would count them."""
    files = sorted(results.glob(f"*/{FILE}"))
    parts = [f"{_caption(reports)}\n\n{_table(reports)}" for f in files if (reports := load(f))]
    return "\n".join(parts) if parts else f"not measured yet: `{COMMAND}`\n"


def _caption(reports: Iterable[Report]) -> str:
    """Device, date, commit and the tool's version."""
    last = list(reports)[-1]
    machine = last.machine
    commit = str(machine.get("commit") or "unknown")[:10]
    told = [f"**{machine.get('device', 'unknown device')}**", str(machine.get("date", ""))[:10]]
    told += [f"commit {commit}", f"Nsight Compute {last.tool}"]
    return ", ".join(filter(None, told)) + "."


def _table(reports: Iterable[Report]) -> str:
    moved_words = ("predicted", "DRAM read", "DRAM written", "ratio", "with what the L2 kept")
    head = ("call", *moved_words, "DRAM of peak", "kernel time", "bottleneck")
    rows = []
    for one in reports:
        moved, k = one.traffic, one.longest
        direction = "" if one.direction == "forward" else f" {one.direction}"
        peak = k.get("dram_peak")
        ratio = NONE if moved.ratio is None else f"{moved.ratio:.3f}"
        rows.append(
            [
                f"{one.operator} {one.implementation} `{one.case}`{direction}",
                unit(float(moved.predicted), "B"),
                unit(moved.read, "B"),
                unit(moved.written, "B"),
                ratio if moved.close else f"**{ratio}**",
                NONE if moved.settled is None else f"{moved.settled:.3f}",
                NONE if peak is None else f"{peak:.0f} %",
                time(sum(x.us for x in one.kernels)),
                one.bottleneck.name,
            ]
        )
    note = f"A ratio in bold is more than {100 * CLOSE:.0f} % away from 1.\n"
    return table(head, rows, " rrrrrrr ") + "\n" + note


def rows() -> str:
    """The rows of a profile's table with what each means: ``docs/ncu.md``."""
    return table(("row", "what it is, and what is good"), ([x.label, x.means] for x in LINES))


def rules() -> str:
    """The rules in their order, with where each is from."""
    found = ([str(n), f"`{r.name}`", r.source] for n, r in enumerate(RULES, 1))
    return table(("", "bottleneck", "the rule, and where it is from"), found, "r")
