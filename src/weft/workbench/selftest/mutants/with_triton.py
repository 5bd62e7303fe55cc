"""Typical faults of a kernel in Triton: masks, tiles, low-precision sums, streams, launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch

from weft.core import registry
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import NEEDS_GPU, Forward, blank, plant

HUGE = "needs 2^31 elements, which no CPU is asked for"
RACES = "interpreted programs run one after another: a race needs a GPU"
ROUNDS = "the interpreter does not round factors to tf32"
STREAMS = "without a GPU there are no streams"


def kernels() -> Any:
    """Return the module of kernels; it imports triton, so it is imported when a mutant is made."""
    return import_module("weft.workbench.selftest.mutants.triton_kernels")


def forward_of(operator: str, fault: str) -> Callable[[], Forward]:
    return lambda: partial(kernels().LAUNCH[operator], fault, {})


def _ignores_launch_error(operator: str) -> Callable[[], Forward]:
    def forward(*x: torch.Tensor, **params: object) -> Any:
        return kernels().ignores_a_failed_launch(blank(operator, *x), x[0])

    return lambda: forward


def _default_stream(operator: str) -> Callable[[], Forward]:
    def forward(*x: torch.Tensor, **params: object) -> Any:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return registry.implementation(operator, "triton").forward(*x, **params)

    return lambda: forward


def _for(operator: str, *faults: tuple[Any, ...]) -> Iterator[Mutant]:
    for fault, title, killed_by, *rest in faults:
        more = dict(rest[0]) if rest else {}
        row, what = fault.split("/")
        identity = f"{row}/{operator}/triton/{what}"
        yield plant(identity, title, killed_by, forward_of(operator, fault), **more)
    yield plant(f"W21/{operator}/triton/ignored-launch", "ignores a failed launch", "written",
                _ignores_launch_error(operator))  # fmt: skip
    yield plant(f"W23/{operator}/triton/default-stream", "launches on the default stream", "stream",
                _default_stream(operator), only="stream", not_here=STREAMS,
                **NEEDS_GPU)  # fmt: skip


def _only(check: str) -> dict[str, Any]:
    return {"only": check}


OVERFLOW = {"only": "huge", "not_here": HUGE, **NEEDS_GPU}
STRIDES = ("W06/any-strides", "assumes contiguous rows", "error special written returns",
           _only("strides"))  # fmt: skip
NOTHING = ("W01/nothing", "stores nothing", "written")
NO_NAN = ("W12/no-nan", "treats NaN as a number", "special", _only("values"))

MUTANTS = (
    *_for(
        "softmax",
        NOTHING,
        STRIDES,
        ("W04/last-tile", "skips the rows of the last tile", "written"),
        ("W04/no-tail", "skips the remainder after vectors of 8", "written", _only("sizes")),
        ("W05/no-load-mask", "no mask over columns on the load", "error special written"),
        ("W05/no-store-mask", "no mask over rows on the store", "guards", _only("guards")),
        ("W08/half-sums", "sums in fp16", "error drift property"),
        ("W09/no-maximum", "does not subtract the maximum", "special error", _only("values")),
        ("W10/an-eps", "divides by the sum + 1e-3", "error drift property"),
        NO_NAN,
        ("W15/adds", "adds to sums that it does not zero", "error drift property"),
        ("W17/int32", "counts elements in 32 bits", "written", OVERFLOW),
        ("W18/no-columns", "raises where rows have no columns", "returns", _only("empties")),
    ),
    *_for(
        "gelu",
        NOTHING,
        STRIDES,
        ("W04/last-tile", "skips the last tile", "written"),
        ("W04/no-tail", "skips the remainder after vectors of 8", "written", _only("sizes")),
        ("W05/no-store-mask", "no mask on the store", "guards", _only("guards")),
        ("W08/coarse", "works in fp16", "error drift"),
        ("W10/no-scale", "the factor 1/2 dropped", "error property"),
        NO_NAN,
        ("W13/textbook-tanh", "tanh as (e - 1) / (e + 1)", "special", _only("values")),
        ("W15/adds", "adds to a buffer that it does not zero", "error drift property"),
        ("W17/int32", "counts elements in 32 bits", "written", OVERFLOW),
    ),
    *_for(
        "sum",
        ("W01/nothing", "stores nothing", "written special error"),
        STRIDES,
        ("W04/last-tile", "skips the last tile", "error drift"),
        ("W05/no-load-mask", "no mask on the load", "special written error"),
        ("W05/no-store-mask", "one partial sum too many stored", "guards error again special"),
        ("W08/half-sums", "sums in fp16", "error drift special"),
        NO_NAN,
        ("W14/one-cell", "all programs add to one cell", "error repeats again",
         {"not_here": RACES, **NEEDS_GPU}),
        ("W15/adds", "adds to a buffer that it does not zero", "error drift"),
        ("W17/int32", "counts elements in 32 bits", "error special", OVERFLOW),
    ),
    *_for(
        "matmul",
        NOTHING,
        STRIDES,
        ("W04/last-tile", "skips the last tile of K", "error"),
        ("W04/no-tail", "skips the columns after tiles of 8", "written", _only("sizes")),
        ("W05/no-load-mask", "loads one element of K too many", "error special written drift"),
        ("W05/no-store-mask", "a row too many stored", "guards", _only("guards")),
        ("W08/half-sums", "sums in fp16", "error drift property special"),
        ("W08/tf32", "cuts float32 factors to ten bits", "error drift property",
         {"not_here": ROUNDS, **NEEDS_GPU}),
        NO_NAN,
        ("W15/adds", "adds to a buffer that it does not zero", "error drift property"),
        ("W17/int32", "counts elements in 32 bits", "written", OVERFLOW),
    ),
)  # fmt: skip
