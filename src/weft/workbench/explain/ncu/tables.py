"""Markdown tables of committed profiles for the documentation: ``results/<device>/ncu.ndjson``.

Each line is one report. The suffix is not ``.jsonl``, since files of that name below ``results/`` are records
of bench. cog calls these functions from the root of a checkout, so the tables must not depend on the day or
the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from weft.core import WeftError
from weft.workbench.explain.ncu.report import Report
from weft.workbench.explain.ncu.rules import RULES
from weft.workbench.explain.ncu.text import ROWS
from weft.workbench.explain.ncu.traffic import CLOSE
from weft.workbench.report.markdown import RESULTS, table
from weft.workbench.report.scales import NONE, time, unit

FILE = "ncu.ndjson"
COMMAND = (
    "weft profile softmax --tool ncu --impl cuda --case fp32-32768x4096 --json >> results/<device>/ncu.ndjson"
)


def load(path: Path) -> list[Report]:
    """Load a file's reports, the last of each call; raises :class:`WeftError` for a torn line."""
    reports = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            report = Report.from_json(json.loads(line))
        except json.JSONDecodeError as error:
            raise WeftError(f"{path}:{number}: a torn line", got=str(error)) from error
        reports[report.operator, report.implementation, report.case, report.direction] = report
    return list(reports.values())


def measured(results: Path = RESULTS) -> str:
    """Return one table a device of predicted and counted bytes, or the command that counts them."""
    files = sorted(results.glob(f"*/{FILE}"))
    sections = [f"{_caption(reports)}\n\n{_table(reports)}" for f in files if (reports := load(f))]
    return "\n".join(sections) if sections else f"not measured yet: `{COMMAND}`\n"


def _caption(reports: Iterable[Report]) -> str:
    """Return device, date, commit and the tool's version."""
    last = list(reports)[-1]
    machine = last.machine
    commit = str(machine.get("commit") or "unknown")[:10]
    parts = [f"**{machine.get('device', 'unknown device')}**", str(machine.get("date", ""))[:10]]
    parts += [f"commit {commit}", f"Nsight Compute {last.tool}"]
    return ", ".join(filter(None, parts)) + "."


def _table(reports: Iterable[Report]) -> str:
    byte_columns = ("predicted", "DRAM read", "DRAM written", "ratio", "with bytes left in the L2")
    head = ("call", *byte_columns, "DRAM of peak", "kernel time", "bottleneck")
    rows = []
    for report in reports:
        traffic, k = report.traffic, report.longest
        direction = "" if report.direction == "forward" else f" {report.direction}"
        peak = k.get("dram_peak")
        ratio = NONE if traffic.ratio is None else f"{traffic.ratio:.3f}"
        rows.append(
            [
                f"{report.operator} {report.implementation} `{report.case}`{direction}",
                unit(float(traffic.predicted), "B"),
                unit(traffic.read, "B"),
                unit(traffic.written, "B"),
                ratio if traffic.close else f"**{ratio}**",
                NONE if traffic.settled is None else f"{traffic.settled:.3f}",
                NONE if peak is None else f"{peak:.0f} %",
                time(sum(x.us for x in report.kernels)),
                report.bottleneck.name,
            ]
        )
    note = f"A ratio in bold is more than {100 * CLOSE:.0f} % away from 1.\n"
    return table(head, rows, " rrrrrrr ") + "\n" + note


def rows() -> str:
    """Return the rows of the counters' table with their meanings: ``docs/speed/counters.md``."""
    return table(("row", "meaning, and good values"), ([x.label, x.meaning] for x in ROWS))


def rules() -> str:
    """Return the rules in their order with their sources."""
    rows = ([str(n), f"`{r.name}`", r.source] for n, r in enumerate(RULES, 1))
    return table(("", "bottleneck", "rule and source"), rows, "r")
