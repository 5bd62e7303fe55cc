"""Which records are A's and which are B's: by file, or by commit within files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.core import Record, WeftError

DIRTY = "-dirty"
SHOWN = 12  # characters of a commit that a person is shown


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Some records' commit, as it is shown: ``-dirty`` where the tree differed from it."""

    commit: str
    first: str
    last: str
    records: int

    @property
    def short(self) -> str:
        """The commit's first digits, and whether the tree was dirty."""
        dirty = DIRTY if self.commit.endswith(DIRTY) else ""
        return self.commit.removesuffix(DIRTY)[:SHOWN] + dirty

    def to_json(self) -> dict[str, Any]:
        """The commit as plain data."""
        return asdict(self)


def label(record: Record) -> str:
    """The commit of a record; ``unknown`` where nobody knew it."""
    named = str(record.machine.get("commit") or "unknown")
    return named + (DIRTY if record.machine.get("dirty") else "")


def commits(records: Sequence[Record]) -> list[Commit]:
    """The commits of some records, the one that was measured first first."""
    dates: dict[str, list[str]] = {}
    for r in records:
        dates.setdefault(label(r), []).append(str(r.machine.get("date") or ""))
    found = [
        Commit(commit=name, first=min(seen), last=max(seen), records=len(seen))
        for name, seen in dates.items()
    ]
    return sorted(found, key=lambda c: (c.first, c.last))


def pick(records: Sequence[Record], wanted: str) -> list[Record]:
    """The records of a commit, named by its first digits; a clean tree's before a dirty one's.

    Raises :class:`WeftError` where none or several fit.
    """
    prefix = wanted.removesuffix(DIRTY)
    here = commits(records)
    fit = [c.commit for c in here if prefix and c.commit.removesuffix(DIRTY).startswith(prefix)]
    dirty = [c for c in fit if c.endswith(DIRTY)]
    clean = [] if wanted.endswith(DIRTY) else [c for c in fit if not c.endswith(DIRTY)]
    found = clean or dirty
    if len(found) != 1:
        raise WeftError(
            "no records of this commit" if not found else "several commits begin like this",
            expected=f"one of {_listed(here)}",
            got=wanted or "an empty name",
        )
    return [r for r in records if label(r) == found[0]]


def _listed(found: Sequence[Commit]) -> str:
    return ", ".join(f"{c.short} ({c.first[:10]})" if c.first else c.short for c in found)


def two_sides(
    files: Sequence[Sequence[Record]], wanted: tuple[str, str] | None
) -> tuple[list[Record], list[Record]]:
    """A's and B's records: those of two named commits in all the files; else of one file with
    exactly two commits the earlier and the later; else of the first file and of the second.

    Raises :class:`WeftError` where that leaves no two sides.
    """
    together = [r for records in files for r in records]
    if wanted is not None:
        a, b = pick(together, wanted[0]), pick(together, wanted[1])
        if label(a[0]) == label(b[0]):
            raise WeftError(
                "a commit cannot be compared with itself",
                expected="two commits",
                got=" and ".join(wanted),
                hint="for two runs of one commit, write them to two files",
            )
        return a, b
    if len(files) == 1:
        here = commits(together)
        if len(here) != 2:
            raise WeftError(
                "one file, and it is not clear what to compare",
                expected="records of two commits in it",
                got=f"{len(here)}: {_listed(here)}",
                hint="name two: --commits OLD NEW, or give a second file",
            )
        return pick(together, here[0].commit), pick(together, here[1].commit)
    if len(files) != 2:
        raise WeftError(
            "which of these is before, and which after",
            expected="one file or two, or --commits OLD NEW",
            got=f"{len(files)} files",
        )
    return list(files[0]), list(files[1])


def differences(a: Sequence[Record], b: Sequence[Record]) -> list[str]:
    """What else differs between two sides of like machines: driver, power limit, versions."""

    def told(records: Sequence[Record]) -> Mapping[str, Any]:
        here = records[-1].machine
        versions = {f"{k} version": v for k, v in (here.get("versions") or {}).items()}
        return {"driver": here.get("driver"), "power limit": here.get("power_limit_w"), **versions}

    one, other = told(a), told(b)
    keys = [k for k in one if k in other and one[k] != other[k]]
    return [f"{k}: {one[k]} in A, {other[k]} in B" for k in keys]
