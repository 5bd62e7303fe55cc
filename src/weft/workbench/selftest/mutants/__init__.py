"""Catalogue of the planted kernels: mutants that must fail and honest controls that must pass.

Rows W01 to W30 are kinds of errors, C01 to C25 and C30 kinds of cheating, H1 to H13 controls. Each module of
this folder defines ``MUTANTS``; it is imported when the catalogue is first requested.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from weft.core.operator import unknown_name

if TYPE_CHECKING:
    from weft.workbench.selftest.mutants.mutant import Mutant
    from weft.workbench.sources.source import LoadedFile, Source

SINGLE_OPERATORS = (
    "softmax",
    "gelu",
    "sum",
    "matmul",
    "layer_norm",
    "cross_entropy",
    "cumsum",
    "transpose",
    "histogram",
    "topk",
    "mlp_gelu",
    "sort",
    "reduce",
    "stencil",
)
FAMILIES = ("sparse", "segments", "conv", "sparse24", "block_sparse")
WRONG = ("wrong", *(f"wrong_{name}" for name in (*SINGLE_OPERATORS, *FAMILIES)), "backward")
KERNELS = ("with_triton", "with_numba", "with_cuda")
PROBLEMS = ("unvarying", "problem_controls", "layouts")
CHEATS = ("cheats", "cheats_callers", "cheats_buffers", "cheats_pages", "cheats_rows")
MODULES = (*WRONG, *KERNELS, "small_parts", "small_slices", *CHEATS, "controls", *PROBLEMS)


@cache
def catalogue() -> tuple[Mutant, ...]:
    """Return every mutant and every control, by row."""
    mutants: list[Mutant] = []
    for name in MODULES:
        module = f"{__name__}.{name}"
        if find_spec(module) is not None:
            mutants += import_module(module).MUTANTS
    ids = [m.id for m in mutants]
    assert len(set(ids)) == len(ids), f"duplicate ids: {sorted({i for i in ids if ids.count(i) > 1})}"
    return tuple(sorted(mutants, key=lambda m: (m.honest, m.id)))


def find(identity: str) -> Mutant:
    """Return the mutant of this id; raise :class:`WeftError` with the nearest ids."""
    for mutant in catalogue():
        if mutant.id == identity:
            return mutant
    raise unknown_name("mutant", identity, [m.id for m in catalogue()])


def load(source: Source) -> LoadedFile:
    """Load a new implementation of the mutant whose id is the source's path."""
    from weft.workbench.sources.source import LoadedFile

    return LoadedFile(implementations=(find(source.path).make(),))
