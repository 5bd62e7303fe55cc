"""What is planted, as Markdown from the catalogue: what is wrong, where, and what kills it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from weft.workbench import mutants
from weft.workbench.figures import RESULTS, table
from weft.workbench.mutants.mutant import Mutant
from weft.workbench.selftest import left_out


def planted() -> str:
    """One line a way of being wrong: in which operators and backends, and by what it is killed."""
    return table(["row", "the kernel", "planted in", "killed by"], list(_rows(False)))


def controls() -> str:
    """The honest kernels, one a line."""
    rows = [[row[0], row[1], row[2]] for row in _rows(True)]
    return table(["row", "the kernel", "planted in"], rows)


def alone() -> str:
    """For each check or kind of cases: the mutants that nothing else kills."""
    rows = []
    for name, what in left_out().items():
        found = [m.id for m in mutants.catalogue() if m.only == name]
        shown = ", ".join(f"`{i}`" for i in found[:2]) + (", ..." if len(found) > 2 else "")
        rows.append([f"`{name}`", what, str(len(found)), shown or "-"])
    return table(["left out", "what it is", "survive then", "such as"], rows)


def results(folder: Path = RESULTS) -> str:
    """What each committed run of the selftest found, one device a line; then what was left."""
    rows, notes = [], []
    for file in sorted(folder.glob("*/selftest*.json")):
        said = json.loads(file.read_text())
        here = said["machine"]
        changed = " with uncommitted changes" if here.get("dirty") else ""
        commit = f"commit {str(here['commit'])[:10]}{changed}"
        named = f"{here['device']}, {here['date'][:10]}, {commit}"
        if "runs" in said:
            told = f"{said['runs']} honest runs, {said['verdicts']} verdicts"
            rows.append([named, told, "", f"{len(said['false_alarms'])} false alarms"])
            continue
        killed = f"{said['killed']} of {said['planted']}"
        controls = f"{said['controls_passed']} of {said['controls']} passed"
        rows.append([named, killed, str(len(said["not_run"])), controls])
        notes += [f"- `{i}` survived ({file.name})" for i in said["survivors"]]
        alarms = ((a["id"], a["reason"]) for a in said["false_alarms"])
        notes += [f"- `{i}` was refused, though honest ({file.name}): {why}" for i, why in alarms]
    if not rows:
        return "No run is committed yet."
    heads = ["device", "killed of those that ran", "not run there", "honest controls"]
    return "\n".join([table(heads, rows), *notes])


def _rows(honest: bool) -> Iterator[list[str]]:
    groups: dict[tuple[str, str, str], list[Mutant]] = {}
    for m in mutants.catalogue():
        if m.honest == honest:
            groups.setdefault((m.row, m.title, " ".join(m.killed_by)), []).append(m)
    for (row, title, by), group in groups.items():
        operators = ", ".join(dict.fromkeys(m.operator for m in group))
        backends = ", ".join(dict.fromkeys(m.backend for m in group))
        yield [row, title, f"{operators} ({backends})", by.replace(" ", ", ")]
