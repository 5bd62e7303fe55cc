"""Description of a candidate's source, and the dispatch to the loader of its kind.

A :class:`Source` is plain data, so that it can be sent to the worker process that loads it. The
loader executes the candidate's code, so it normally runs only there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from weft.core import Implementation, Operator
from weft.core.operator import unknown_name

# Named as strings, like the registry's entries: a loader is imported only for a source of its kind.
LOADERS = {
    "file": "weft.workbench.sources.python_file:load",
    "kernelbench": "weft.workbench.judge.kernelbench:load",
    "gpumode": "weft.workbench.judge.gpumode:load",
    "flashinfer-trace": "weft.workbench.judge.trace_problem:load",
    "mutant": "weft.workbench.selftest.mutants:load",
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Origin of a candidate: ``kind`` names its loader, ``path`` is what that loader reads.

    ``reference`` is the problem's file if the candidate's format has one, and ``operator`` the
    operator to compute if the file does not name it. With ``is_reference`` the source is that file
    itself, in place of a candidate.
    """

    kind: str
    path: str
    reference: str = ""
    operator: str = ""
    is_reference: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"extra": dict(self.extra)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Source:
        return Source(**data)


@dataclass(frozen=True, kw_only=True)
class LoadedFile:
    """Declarations of a source: operators of its own, and implementations of any operator.

    ``parameters`` are the reference's parameters that a candidate has too, where gradients are judged.
    """

    operators: tuple[Operator, ...] = ()
    implementations: tuple[Implementation, ...] = ()
    parameters: tuple[str, ...] = ()

    def implementation(self, operator: str, name: str) -> Implementation:
        """Return an implementation by name; raise :class:`WeftError` with the nearest names."""
        for implementation in self.implementations:
            if (implementation.operator, implementation.name) == (operator, name):
                return implementation
        names = [i.name for i in self.implementations if i.operator == operator]
        raise unknown_name(f"implementation of {operator}", name, names)


def load(source: Source) -> LoadedFile:
    """Load a source in this process; raise :class:`WeftError` if it is invalid."""
    if source.kind not in LOADERS:
        raise unknown_name("kind of source", source.kind, list(LOADERS))
    _patch_numba(Path(source.path))
    module, _, function = LOADERS[source.kind].partition(":")
    loaded = getattr(import_module(module), function)(source)
    assert isinstance(loaded, LoadedFile)
    return loaded


def _patch_numba(path: Path) -> None:
    """Repair numba.cuda before a file that uses it is loaded: see ``backends.numba_jit``."""
    # By its text, which needs no parser: a wrong guess costs one import.
    if path.suffix == ".py" and path.is_file() and "numba" in path.read_text(errors="replace"):
        import_module("weft.backends.numba_jit")
