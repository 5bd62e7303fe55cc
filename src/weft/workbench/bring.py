"""Bringing: where a stranger's code comes from, and who reads it.

A source is plain data, so that it can be sent to the process that is to run it. Its loader runs
there, and only there: what it executes is somebody else's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from weft.core import Implementation, Operator
from weft.core.operator import unknown_name

LOADERS = {
    "file": "weft.workbench.bring_file:load",
    "kernelbench": "weft.workbench.formats.kernelbench:load",
    "gpumode": "weft.workbench.formats.gpumode:load",
    "mutant": "weft.workbench.mutants:load",
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a candidate comes from: ``kind`` names its loader, ``path`` is what that reads.

    ``reference`` is the file of the problem, where the candidate's format has one; ``operator``
    the operator that is meant, where the file does not say it.
    """

    kind: str
    path: str
    reference: str = ""
    operator: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"extra": dict(self.extra)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Source:
        return Source(**data)


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What a source declares: operators of its own, and implementations of any."""

    operators: tuple[Operator, ...] = ()
    implementations: tuple[Implementation, ...] = ()

    def implementation(self, operator: str, name: str) -> Implementation:
        """The implementation of this name; raises :class:`WeftError` naming the near ones."""
        for one in self.implementations:
            if (one.operator, one.name) == (operator, name):
                return one
        names = [i.name for i in self.implementations if i.operator == operator]
        raise unknown_name(f"implementation of {operator}", name, names)


def load(source: Source) -> Brought:
    """Read a source in this process; raises :class:`WeftError` with what is wrong with it."""
    if source.kind not in LOADERS:
        raise unknown_name("kind of source", source.kind, list(LOADERS))
    _ready_for(Path(source.path))
    module, _, function = LOADERS[source.kind].partition(":")
    found = getattr(import_module(module), function)(source)
    assert isinstance(found, Brought)
    return found


def _ready_for(path: Path) -> None:
    """Mend numba.cuda before a file that uses it is read: see ``backends.numba_jit``."""
    if path.suffix == ".py" and path.is_file() and "numba" in path.read_text(errors="replace"):
        import_module("weft.backends.numba_jit")
