"""Typical faults of a kernel in CUDA C++. Each needs a GPU; without one it is only compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch

from weft.core import registry
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import NEEDS_GPU, Forward, blank, plant

GPU = "CUDA C++ needs a GPU to run; here it is compiled only"


def kernels() -> Any:
    """Return the module of launches; it is imported when a mutant is made."""
    return import_module("weft.workbench.selftest.mutants.cuda_kernels")


def forward_of(operator: str, fault: str) -> Callable[[], Forward]:
    return lambda: partial(kernels().LAUNCH[operator], fault, {})


def _ignores_launch_error(operator: str) -> Callable[[], Forward]:
    def forward(*x: torch.Tensor, **params: object) -> Any:
        return kernels().ignores_a_failed_launch(operator, blank(operator, *x), x[0])

    return lambda: forward


def _default_stream(operator: str) -> Callable[[], Forward]:
    def forward(*x: torch.Tensor, **params: object) -> Any:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return registry.implementation(operator, "cuda").forward(*x, **params)

    return lambda: forward


def _for(operator: str, *faults: tuple[str, ...]) -> Iterator[Mutant]:
    for fault, title, killed_by, *only in (*faults, GRID):
        row, what = fault.split("/")
        yield plant(f"{row}/{operator}/cuda/{what}", title, killed_by, forward_of(operator, fault),
                    only="".join(only), not_here=GPU, **NEEDS_GPU)  # fmt: skip
    yield plant(f"W21/{operator}/cuda/ignored-launch", "ignores a failed launch", "written",
                _ignores_launch_error(operator), not_here=GPU, **NEEDS_GPU)  # fmt: skip
    yield plant(f"W23/{operator}/cuda/default-stream", "launches on the default stream", "stream",
                _default_stream(operator), only="stream", not_here=GPU,
                **NEEDS_GPU)  # fmt: skip


GRID = ("W18/grid-of-0", "launches a grid of 0 blocks", "returns", "empties")
STRIDES = ("W06/any-strides", "assumes contiguous rows", "error special written returns",
           "strides")  # fmt: skip
NOTHING = ("W01/nothing", "stores nothing", "written")
NO_NAN = ("W12/no-nan", "treats NaN as a number", "special", "values")
BARRIER = ("W14/no-barrier", "a barrier is missing", "error repeats again drift special property")
INT32 = ("W17/int32", "counts elements in 32 bits", "written error special", "huge")

MUTANTS = (
    *_for(
        "softmax",
        NOTHING,
        STRIDES,
        ("W04/last-tile", "skips the last row", "written"),
        ("W05/no-load-mask", "reads rows to a multiple of 32", "error special written drift"),
        ("W05/no-store-mask", "stores one element too many", "guards", "guards"),
        ("W08/half-sums", "sums in fp16", "error drift property"),
        ("W09/no-maximum", "does not subtract the maximum", "special error", "values"),
        ("W10/no-scale", "divides by the sum + 1e-3", "error drift property"),
        NO_NAN,
        BARRIER,
        ("W15/adds", "adds to sums that it does not zero", "error drift property"),
        INT32,
    ),
    *_for(
        "gelu",
        NOTHING,
        STRIDES,
        ("W04/last-tile", "skips the last tile", "written"),
        ("W05/no-store-mask", "no mask on the store", "guards", "guards"),
        ("W08/half-sums", "works in fp16", "error drift"),
        ("W10/no-scale", "the factor 1/2 dropped", "error property"),
        NO_NAN,
        ("W13/textbook-tanh", "tanh as (e - 1) / (e + 1)", "special", "values"),
        ("W15/adds", "adds to a buffer that it does not zero", "error drift property"),
        INT32,
    ),
    *_for(
        "sum",
        ("W01/nothing", "stores nothing", "special written error"),
        STRIDES,
        ("W04/last-tile", "skips the last tile", "error drift"),
        ("W05/no-load-mask", "no mask on the load", "special written error"),
        ("W05/no-store-mask", "one partial sum too many stored", "guards error again repeats"),
        ("W08/half-sums", "sums in fp16", "error drift special"),
        NO_NAN,
        BARRIER,
        ("W14/one-cell", "all blocks add to one cell", "error repeats again"),
        ("W15/adds", "adds to a cell that it does not zero", "error drift"),
        INT32,
    ),
    *_for(
        "matmul",
        NOTHING,
        STRIDES,
        ("W04/last-tile", "skips the last tile of K", "error drift"),
        ("W05/no-load-mask", "loads one element of K too many", "error special written drift"),
        ("W05/no-store-mask", "a row too many stored", "guards", "guards"),
        ("W08/half-sums", "sums in fp16", "error drift property special"),
        ("W10/no-scale", "scaled by 1.01", "error drift property"),
        NO_NAN,
        BARRIER,
        ("W15/adds", "adds to a buffer that it does not zero", "error drift property"),
        INT32,
    ),
)
