"""``Report``: the changes of :func:`weft.patch`, module by module, and their undo."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from weft.core import WeftError

HEAD = ("module", "kind", "replaced by", "or why not")
MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Row:
    """Row of the table: a module.

    ``by`` names the operators that replace it; if it is empty, ``reason`` says why there are none.
    ``class_name`` is the module's class without its package, or ``loss`` or ``head``.
    """

    path: str
    kind: str
    by: str = ""
    reason: str = ""
    class_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Modules of one class: how many there are, how many are replaced, by what, and why others are not.

    A module that a replaced parent computes itself counts as replaced: ``by`` says inside which class.
    """

    name: str
    modules: int
    replaced: int
    by: tuple[str, ...]
    reasons: tuple[str, ...]

    def count(self, some: int) -> str:
        """Return the name with how many of its modules are meant: ``RMSNorm (2 of 33 modules)``."""
        part = f"{some} of " if some < self.modules else ""
        return f"{self.name} ({part}{self.modules} module{'s' if self.modules != 1 else ''})"


@dataclass(frozen=True)
class _Change:
    """An attribute that was set, and its previous value."""

    owner: Any
    name: str
    value: object
    previous: object

    def is_in_place(self) -> bool:
        return vars(self.owner).get(self.name, MISSING) is self.value

    def undo(self) -> None:
        if self.previous is MISSING:
            del vars(self.owner)[self.name]
        else:
            vars(self.owner)[self.name] = self.previous


@dataclass(eq=False, repr=False)
class Report:
    """Table of a patched model. Printed, the first line says how many kinds of modules are replaced.

    Then come the kinds that are not replaced, and a table where modules that differ in a number only share a
    line.

    ``covered`` has a row for each module that a replaced parent computes itself. As a context manager the
    report undoes the patch at the end of the block.
    """

    rows: list[Row] = field(default_factory=list)
    covered: list[Row] = field(default_factory=list)
    _changes: list[_Change] = field(default_factory=list, repr=False)

    @property
    def replaced(self) -> list[Row]:
        return [row for row in self.rows if row.by]

    @property
    def unchanged(self) -> list[Row]:
        return [row for row in self.rows if not row.by]

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of modules, those with the most replaced modules first."""
        by_class: dict[str, dict[str, list[Row]]] = {}
        for row in (*self.rows, *self.covered):
            by_class.setdefault(row.class_name, {}).setdefault(row.path, []).append(row)
        kinds = []
        for name, modules in by_class.items():
            # A module may have two rows: an attention is replaced for its rotation and for its product.
            replaced = {path: rows for path, rows in modules.items() if any(r.by for r in rows)}
            rows = [row for rows in modules.values() for row in rows]
            by = dict.fromkeys(row.by for row in rows if row.by)
            reasons = dict.fromkeys(row.reason for row in rows if row.reason)
            kinds.append(
                Kind(
                    name=name,
                    modules=len(modules),
                    replaced=len(replaced),
                    by=tuple(by),
                    reasons=tuple(reasons),
                )
            )
        return sorted(kinds, key=lambda kind: (not kind.replaced, -kind.replaced, -kind.modules))

    @property
    def summary(self) -> str:
        """One line: ``replaced 2 of 5 kinds: RMSNorm (33 modules), Embedding (1 module)``."""
        replaced = [kind for kind in self.kinds if kind.replaced]
        return f"replaced {len(replaced)} of {len(self.kinds)} kinds: " + ", ".join(
            kind.count(kind.replaced) for kind in replaced
        )

    def set(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of an object, not of its class, and record its previous value."""
        # Through vars(): torch.nn.Module's __setattr__ would register modules and parameters.
        previous = vars(owner).get(name, MISSING)
        vars(owner)[name] = value
        self._changes.append(_Change(owner, name, value, previous))

    def undo(self) -> None:
        """Restore the model; a second call does nothing.

        Raises:
            WeftError: something else has changed a patched attribute since; nothing is undone then.
        """
        # All changes are checked before the first is undone, so a refusal leaves the model as it is.
        for change in self._changes:
            if not change.is_in_place():
                raise WeftError(
                    f"{type(change.owner).__name__}.{change.name} was changed after weft.patch",
                    hint="undo in the reverse order: the last change first",
                )
        while self._changes:
            # In reverse: an attribute that was set twice gets its first value back.
            self._changes.pop().undo()

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<weft.patch: {self.summary}>"

    def __str__(self) -> str:
        left = [
            f"not replaced: {kind.count(kind.modules - kind.replaced)}: {'; '.join(kind.reasons)}"
            for kind in self.kinds
            if kind.replaced < kind.modules
        ]
        return "\n".join([self.summary, *left, "", self._table()])

    def _table(self) -> str:
        groups = Counter(
            (re.sub(r"(?<=\.)\d+(?=\.|$)", "*", r.path) or "(the model)", r.kind, r.by, r.reason)
            for r in self.rows
        )
        lines = [
            (f"{path} ({count}x)" if count > 1 else path, kind, by or "-", reason)
            for (path, kind, by, reason), count in groups.items()
        ]
        widths = [max(map(len, column)) for column in zip(HEAD, *lines, strict=True)]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in (HEAD, *lines)
        )
