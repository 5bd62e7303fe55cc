"""Honest runs: check Weft's own implementations repeatedly on new seeds; none may fail.

A false alarm is as harmful as a surviving mutant: a user who is refused without reason stops
reading the verdicts. The module also writes the tables of ``docs/trust/tested.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from weft import backends
from weft.core import Implementation, Interrupted, Operator, Verdict, registry
from weft.core.json_files import read_json
from weft.core.record import FAIL, PASS
from weft.workbench.check.check import check
from weft.workbench.report.markdown import RESULTS, table
from weft.workbench.selftest import mutants
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.run import can_be_left_out

OPERATORS = ("softmax", "gelu", "sum", "matmul")
MAX_ELEMENTS = 1 << 17  # of an input: a run should take seconds
MAX_INTERPRETED_ELEMENTS = 1 << 10  # where Python runs the threads one at a time


@dataclass(frozen=True, kw_only=True)
class HonestRuns:
    """Result of ``runs`` runs over all cases of one implementation each: verdicts, false alarms."""

    runs: int
    verdicts: int
    alarms: tuple[Verdict, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "runs": self.runs,
            "verdicts": self.verdicts,
            "false_alarms": [
                {
                    "operator": v.operator,
                    "implementation": v.implementation,
                    "case": v.case,
                    "direction": v.direction,
                    "reason": v.reason,
                }
                for v in self.alarms
            ],
        }


def run(count: int, device: str, on_done: Callable[[str, int, int], None] | None = None) -> HonestRuns:
    """Make ``count`` runs, each over the cases of the next implementation that can run here.

    A run takes all check and edge cases up to a size, in both directions, on new seeds.
    Implementations that are interpreted here (Triton and numba on a CPU) take small cases only.
    Raises :class:`Interrupted` with the runs so far for a ``KeyboardInterrupt``.
    """
    n_verdicts, alarms, number = 0, [], 0
    # Cycled, so that any number of runs covers the implementations evenly.
    try:
        for operator, implementation in islice(cycle(_runnable(device)), count):
            n_failed = 0
            for verdict in _run_once(operator, implementation, device):
                n_verdicts += verdict.status in (PASS, FAIL)
                if verdict.status == FAIL:
                    n_failed += 1
                    alarms.append(verdict)
            number += 1
            if on_done is not None:
                on_done(f"{operator.name} {implementation.name}: {n_failed} false alarms", number, count)
    except KeyboardInterrupt as error:
        raise Interrupted(HonestRuns(runs=number, verdicts=n_verdicts, alarms=tuple(alarms))) from error
    return HonestRuns(runs=count, verdicts=n_verdicts, alarms=tuple(alarms))


def _runnable(device: str) -> list[tuple[Operator, Implementation]]:
    pairs = []
    for operator in map(registry.operator, OPERATORS):
        cases = operator.select("check", device)
        for implementation in registry.implementations(operator.name):
            if implementation.is_step:
                continue
            # Of any case: an implementation for some dtypes only is run at those.
            if any(backends.support(implementation, c, device) for c in cases):
                pairs.append((operator, implementation))
    return pairs


def _run_once(operator: Operator, implementation: Implementation, device: str) -> Iterator[Verdict]:
    for case in operator.cases:
        if not {"check", "edge"} & case.tags or device not in case.devices:
            continue
        support = backends.support(implementation, case, device)
        limit = MAX_ELEMENTS if support.timed else MAX_INTERPRETED_ELEMENTS
        if max(i.numel for i in case.inputs) > limit:
            continue
        for direction in operator.directions:
            yield check(operator, implementation, case, direction, device)


# -- tables of docs/trust/tested.md ----------------------------------------------------------------


def mutants_table() -> str:
    """Return a Markdown table of the mutants, one line for each fault."""
    return table(["row", "the kernel", "planted in", "killed by"], list(_catalogue_rows(False)))


def controls_table() -> str:
    """Return a Markdown table of the honest controls."""
    return table(["row", "the kernel", "planted in"], [row[:3] for row in _catalogue_rows(True)])


def single_check_table() -> str:
    """Return a Markdown table of the mutants that survive without one check or kind of cases."""
    rows = []
    for name, description in can_be_left_out().items():
        ids = [m.id for m in mutants.catalogue() if m.only == name]
        shown = ", ".join(f"`{i}`" for i in ids[:2]) + (", ..." if len(ids) > 2 else "")
        rows.append([f"`{name}`", description, str(len(ids)), shown or "-"])
    return table(["left out", "what it is", "survive then", "such as"], rows)


def results_table(folder: Path = RESULTS) -> str:
    """Return a Markdown table of the committed selftests, one line for each, then the failures."""
    rows, notes = [], []
    for file in sorted(folder.glob("*/selftest*.json")):
        report, name = read_json(file), f"{file.parent.name}/{file.name}"
        machine = report["machine"]
        changed = " with uncommitted changes" if machine.get("dirty") else ""
        stopped = ", stopped early" if report.get("stopped") else ""
        commit = f"commit {str(machine['commit'])[:10]}{changed}{stopped}"
        source = f"{machine['device']}, {machine['date'][:10]}, {commit}"
        if "runs" in report:
            counts = f"{report['runs']} honest runs, {report['verdicts']} verdicts"
            rows.append([source, counts, "", f"{len(report['false_alarms'])} false alarms"])
            continue
        killed = f"{report['killed']} of {report['planted']}"
        passed = f"{report['controls_passed']} of {report['controls']} passed"
        rows.append([source, killed, str(len(report["not_run"])), passed])
        notes += [f"- `{i}` survived ({name})" for i in report["survivors"]]
        alarms = ((a["id"], a["reason"]) for a in report["false_alarms"])
        notes += [f"- `{i}` was refused, though honest ({name}): {why}" for i, why in alarms]
    if not rows:
        return "No run is committed yet."
    heads = ["device", "killed of those that ran", "not run there", "honest controls"]
    return "\n".join([table(heads, rows), *notes])


def _catalogue_rows(honest: bool) -> Iterator[list[str]]:
    groups: dict[tuple[str, str, str], list[Mutant]] = {}
    for m in mutants.catalogue():
        if m.honest == honest:
            groups.setdefault((m.row, m.title, " ".join(m.killed_by)), []).append(m)
    for (row, title, killed_by), group in groups.items():
        operators = ", ".join(dict.fromkeys(m.operator for m in group))
        group_backends = ", ".join(dict.fromkeys(m.backend for m in group))
        yield [row, title, f"{operators} ({group_backends})", killed_by.replace(" ", ", ")]
