"""What :func:`weft.patch` did, module by module, and the way back."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from weft.core import WeftError

HEAD = ("module", "kind", "replaced by", "or why not")
ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module: ``by`` names the operators that took its place; empty, with a ``reason``."""

    path: str
    kind: str
    by: str = ""
    reason: str = ""


@dataclass(frozen=True)
class _Change:
    holder: Any
    name: str
    value: object
    before: object

    def stands(self) -> bool:
        return vars(self.holder).get(self.name, ABSENT) is self.value

    def undo(self) -> None:
        if self.before is ABSENT:
            del vars(self.holder)[self.name]
        else:
            vars(self.holder)[self.name] = self.before


@dataclass(eq=False)
class Report:
    """The table of a patched model. Printed, modules that differ in a number alone are one line.

    As a context manager it undoes the patch at the end of the block.
    """

    rows: list[Row] = field(default_factory=list)
    _changes: list[_Change] = field(default_factory=list, repr=False)

    @property
    def replaced(self) -> list[Row]:
        return [row for row in self.rows if row.by]

    @property
    def kept(self) -> list[Row]:
        return [row for row in self.rows if not row.by]

    def set(self, holder: Any, name: str, value: object) -> None:
        """Set an attribute of one object, not of its class, and remember what it was."""
        before = vars(holder).get(name, ABSENT)
        vars(holder)[name] = value
        self._changes.append(_Change(holder, name, value, before))

    def undo(self) -> None:
        """Put the model back as it was; nothing happens the second time.

        Raises:
            WeftError: something that was patched has been changed by others since; nothing is
                undone then.
        """
        for change in self._changes:
            if not change.stands():
                raise WeftError(
                    f"{type(change.holder).__name__}.{change.name} was changed after weft.patch",
                    hint="undo in the reverse order: first what was put on top",
                )
        while self._changes:
            self._changes.pop().undo()

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __str__(self) -> str:
        alike = Counter(
            (re.sub(r"(?<=\.)\d+(?=\.|$)", "*", r.path) or "(the model)", r.kind, r.by, r.reason)
            for r in self.rows
        )
        lines = [
            (f"{path} ({count}x)" if count > 1 else path, kind, by or "-", reason)
            for (path, kind, by, reason), count in alike.items()
        ]
        widths = [max(map(len, column)) for column in zip(HEAD, *lines, strict=True)]
        drawn = (
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (HEAD, *lines)
        )
        return "\n".join(drawn)
