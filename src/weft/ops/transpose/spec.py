"""Transpose of the last two dimensions into new memory: y[..., j, i] = x[..., i, j].

Elements are moved and not computed with: outputs are equal bit for bit, and the tolerance allows nothing.
Tiles in shared memory: G. Ruetsch and P. Micikevicius, "Optimizing matrix transpose in CUDA" (NVIDIA, 2009).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core import Case, Cost, Input, Operator, Property, Tolerance, case
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate

FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES = (*FLOATS, *INTEGERS)
# Integers of the size of an element: elements are moved as these, whatever their dtype.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).clone(memory_format=torch.contiguous_format)


def check_arguments(x: Any) -> None:
    validate.tensor("transpose", "x", x, DTYPES, dims=range(2, 65))


def as_words(x: torch.Tensor) -> torch.Tensor:
    """Return a view of ``x`` as integers of the same size."""
    return x.view(WORDS[x.element_size()])


def empty_transpose(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised contiguous tensor for the transpose of ``x``."""
    return x.new_empty((*x.shape[:-2], x.shape[-1], x.shape[-2]))


def cost(c: Case, direction: str) -> Cost:
    """Both directions read one tensor and write one of the same size."""
    (x,) = c.inputs
    out = x.numel * ITEMSIZE[x.dtype]
    return Cost(read=x.nbytes if direction == "forward" else out, written=out)


def _has_the_same_bits(y: torch.Tensor, x: torch.Tensor) -> float:
    """Return infinity if a bit differs: a comparison of numbers takes -0 for 0, and one NaN for another."""
    return 0.0 if torch.equal(as_words(y), as_words(x).transpose(-1, -2)) else math.inf


def _case(
    *shape: int,
    dtype: str = "float32",
    layout: str = "contiguous",
    values: str = "normal",
    name: str = "",
    **more: Any,
) -> Case:
    """Return a case named like ``bf16-72x136-sliced``."""
    x = Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values)
    words = [SHORT.get(dtype, dtype), "x".join(map(str, shape))]
    words += [w for w in (layout, values) if w not in ("contiguous", "normal")]
    return case(x, name=name or "-".join(words), **more)


CPU, CUDA = ("cpu",), ("cuda",)
CHECKS = [
    # Each size of an element, by accesses of 16 bytes, and by shorter ones where a size is odd.
    _case(36, 72),
    _case(64, 40, dtype="float16"),
    _case(40, 72, dtype="bfloat16"),
    _case(18, 34, dtype="float64"),
    *(_case(16, 48, dtype=d) for d in INTEGERS if d != "uint8"),
    _case(7, 13),
    _case(3, 5, 12, 20),
]
EDGES = [
    *(_case(*s, tags="edge") for s in ((0, 5), (1, 37))),
    *(_case(33, 65, layout=k, tags="edge") for k in ("transposed", "sliced", "expanded", "shifted")),
    _case(24, 36, values="special", tags="edge"),
    # Many tiles, by accesses of 2, 8 and 16 bytes; more matrices than a grid's y has.
    *(_case(1000, s, dtype="bfloat16", tags="edge", devices=CUDA) for s in (1001, 1004, 1008)),
    _case(70001, 2, 3, tags="edge", devices=CUDA),
    _case(515, 1029, dtype="int8", tags="edge", devices=CUDA),
]
BENCHES = [
    _case(16384, 16384, dtype="bfloat16", tags="bench", devices=CUDA),
    _case(16384, 16384, tags="bench", devices=CUDA),
    _case(8192, 50304, dtype="bfloat16", tags="bench", devices=CUDA),
    _case(16384, 16384, dtype="uint8", tags="bench", devices=CUDA),
    _case(8192, 16384, dtype="float64", tags="bench", devices=CUDA),
    _case(512, 1024, 64, dtype="bfloat16", tags="bench", devices=CUDA),
    _case(16383, 16385, dtype="bfloat16", tags="bench", devices=CUDA),
    # Over 2^31 elements, where 32-bit offsets overflow.
    _case(65536, 32776, dtype="bfloat16", tags="bench", devices=CUDA),
    _case(1024, 1024, tags="bench", devices=CPU),
]

OPERATOR = Operator(
    name="transpose",
    summary="transpose of the last two dimensions, into new memory",
    formula="y_ji = x_ij",
    signature="transpose(x)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x",),
    save=lambda inputs, output: (),
    tolerance=Tolerance(
        c=0.0, ulps=0.0, reason="stricter than the default: elements are moved, so nothing may differ"
    ),
    properties=(Property(name="has the same bits", holds=_has_the_same_bits),),
    backward_note="the transpose of the gradient; nothing is saved",
)
