"""Kernels that must not pass, and honest ones that must, planted to judge the judge.

The rows W01 to W24 are ways of being wrong, C01 to C16 ways of cheating. A module of this folder
holds ``MUTANTS``; none is imported before the catalogue is asked for.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from weft.core.operator import unknown_name

if TYPE_CHECKING:
    from weft.workbench.bring import Brought, Source
    from weft.workbench.mutants.mutant import Mutant

OF_ONE = ("softmax", "gelu", "sum", "matmul", "layer_norm", "cross_entropy")
WRONG = ("wrong", *(f"wrong_{operator}" for operator in OF_ONE), "backward")
KERNELS = ("with_triton", "with_numba", "with_cuda")
MODULES = (*WRONG, *KERNELS, "cheats", "controls")


@cache
def catalogue() -> tuple[Mutant, ...]:
    """Every mutant and every control, by row."""
    found: list[Mutant] = []
    for name in MODULES:
        module = f"{__name__}.{name}"
        if find_spec(module) is not None:
            found += import_module(module).MUTANTS
    ids = [m.id for m in found]
    assert len(set(ids)) == len(ids), f"twice: {sorted({i for i in ids if ids.count(i) > 1})}"
    return tuple(sorted(found, key=lambda m: (m.honest, m.id)))


def find(identity: str) -> Mutant:
    """The mutant of this id; raises :class:`WeftError` with the near ones."""
    for mutant in catalogue():
        if mutant.id == identity:
            return mutant
    raise unknown_name("mutant", identity, [m.id for m in catalogue()])


def load(source: Source) -> Brought:
    """The implementation of the mutant whose id the source's path is, made anew."""
    from weft.workbench.bring import Brought

    return Brought(implementations=(find(source.path).make(),))
