"""What is planted, as Markdown from the catalogue: what is wrong, where, and what kills it."""

from __future__ import annotations

from collections.abc import Iterator

from weft.workbench import mutants
from weft.workbench.figures import table
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


def _rows(honest: bool) -> Iterator[list[str]]:
    groups: dict[tuple[str, str, str], list[Mutant]] = {}
    for m in mutants.catalogue():
        if m.honest == honest:
            groups.setdefault((m.row, m.title, " ".join(m.killed_by)), []).append(m)
    for (row, title, by), group in groups.items():
        operators = ", ".join(dict.fromkeys(m.operator for m in group))
        backends = ", ".join(dict.fromkeys(m.backend for m in group))
        yield [row, title, f"{operators} ({backends})", by.replace(" ", ", ")]
