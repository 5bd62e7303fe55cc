"""Typical faults of a kernel in numba.cuda, run in the simulator on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import NEEDS_GPU, Forward, plant

RACES = "the simulator's threads take turns: a race needs a GPU"
GRIDS = "the simulator launches a grid of nothing without complaint"
STREAMS = "without a GPU there are no streams"


def kernels() -> Any:
    """Return the module of kernels; it imports numba, so it is imported when a mutant is made."""
    return import_module("weft.workbench.selftest.mutants.numba_kernels")


def forward_of(operator: str, fault: str) -> Callable[[], Forward]:
    return lambda: partial(kernels().LAUNCH[operator], kernels().FAULTS[fault], {})


def _for(operator: str, *faults: tuple[Any, ...]) -> Iterator[Mutant]:
    for fault, title, killed_by, *rest in (*faults, BARRIER, GRID, STREAM):
        row, what = fault.split("/")
        identity = f"{row}/{operator}/numba/{what}"
        if fault == "W14/no-barrier" and operator == "gelu":
            continue  # its threads do not wait for each other
        more = dict(rest[0]) if rest else {}
        yield plant(identity, title, killed_by, forward_of(operator, fault), **more)


BARRIER = ("W14/no-barrier", "a barrier is missing", "error repeats again drift special property",
           {"not_here": RACES, **NEEDS_GPU})  # fmt: skip
GRID = ("W18/grid-of-0", "launches a grid of 0 blocks", "returns",
        {"not_here": GRIDS, "only": "empties", **NEEDS_GPU})  # fmt: skip
STREAM = ("W23/default-stream", "launches on the default stream", "stream",
          {"not_here": STREAMS, "only": "stream", **NEEDS_GPU})  # fmt: skip
TOY = {"not_here": "the cases that show it are too large for the simulator", **NEEDS_GPU}
NO_NAN = ("W12/no-nan", "treats NaN as a number", "special", {"only": "values"})
NOTHING = ("W01/nothing", "stores nothing", "written")

MUTANTS = (
    *_for(
        "softmax",
        NOTHING,
        ("W04/last-block", "skips the last row", "written"),
        ("W09/no-maximum", "does not subtract the maximum", "special error", TOY),
    ),
    *_for(
        "gelu",
        NOTHING,
        ("W04/last-block", "skips the last block", "written"),
        ("W05/no-mask", "no bound on the index", "guards returns"),
        ("W10/no-scale", "the factor 1/2 dropped", "error property"),
        NO_NAN,
    ),
    *_for(
        "sum",
        ("W01/nothing", "stores nothing", "written special error"),
        ("W04/last-block", "skips the last block", "error drift"),
        ("W12/no-nan", "treats NaN as a number", "special", {"only": "special"}),
        ("W15/adds", "adds to a cell that it does not zero", "error drift"),
    ),
    *_for(
        "matmul",
        NOTHING,
        ("W04/last-block", "skips the last tile of K", "error drift"),
        ("W05/no-mask", "no bound on the indices", "guards returns error"),
        ("W12/no-nan", "treats NaN as a number", "special error", TOY),
        ("W15/adds", "adds to a buffer that it does not zero", "error drift property"),
    ),
)
