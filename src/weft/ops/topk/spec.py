"""The k largest or smallest elements along the last dimension, sorted; of equal ones the first by index.

The order of ties makes the result unique, so that values and indices are checked exactly.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core import Case, Cost, Input, Operator, Property, WeftError, case
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate

DTYPES = ("float32", "float16", "bfloat16")
INDEX_BYTES = 8


def reference(x: torch.Tensor, *, k: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.sort(x, dim=-1, descending=largest, stable=True)
    return values[..., :k], indices[..., :k]


def check_arguments(x: Any, *, k: Any, largest: Any = True) -> None:
    validate.tensor("topk", "x", x, DTYPES, dims=range(1, 65))
    if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= x.shape[-1]:
        raise WeftError(
            "topk: k", expected=f"an int from 0 to {x.shape[-1]}, the row's length", got=f"{k!r:.80}"
        )
    validate.flag("topk: largest", largest)


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """Save the indices and the columns of the gradient."""
    return output[1], inputs[0].shape[-1]


def backward(
    grad: torch.Tensor, indices: torch.Tensor, columns: int, *, k: int, largest: bool = True
) -> tuple[torch.Tensor]:
    """Return the gradient by torch: each element's own, and 0 for the others. Indices are distinct."""
    return (grad.new_zeros((*grad.shape[:-1], columns)).scatter_(-1, indices, grad),)


def cost(c: Case, direction: str) -> Cost:
    """Forward: the row once, k values and indices. Backward: these, and the whole gradient is written."""
    (x,) = c.inputs
    size, k = ITEMSIZE[x.dtype], c.params["k"]
    assert isinstance(k, int)
    chosen = x.numel // max(x.shape[-1], 1) * k * (size + INDEX_BYTES)
    if direction == "forward":
        return Cost(read=x.nbytes, written=chosen)
    return Cost(read=chosen, written=x.numel * size)


def _values_are_exact(values: torch.Tensor, x: torch.Tensor, *, k: int, largest: bool = True) -> float:
    """Return infinity unless the values are elements of x, unrounded and in order."""
    expected, _ = reference(x, k=k, largest=largest)
    same = (values == expected) | (values.isnan() & expected.isnan())
    return 0.0 if bool(same.all()) else math.inf


def _case(
    *shape: int,
    k: int,
    dtype: str = "float32",
    layout: str = "contiguous",
    values: str = "normal",
    largest: bool = True,
    **more: Any,
) -> Case:
    """Return a case named like ``fp32-5x257-k8-smallest``."""
    x = Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values)
    words = [SHORT[dtype], "x".join(map(str, shape)), f"k{k}"]
    words += [w for w in (layout, values) if w not in ("contiguous", "normal")]
    words += [] if largest else ["smallest"]
    return case(x, name="-".join(words), k=k, largest=largest, **more)


CUDA = ("cuda",)
CHECKS = [
    *(_case(3, 129, k=8, dtype=d) for d in DTYPES),
    _case(5, 257, k=7, largest=False),
    _case(2, 3, 64, k=8, dtype="bfloat16", largest=False),
    # Every element ties; a row of few distinct values ties at the border of the k.
    _case(4, 300, k=9, values="equal"),
    _case(3, 1000, k=50, dtype="bfloat16"),
    _case(3, 200, k=5, values="rising"),
    _case(3, 200, k=5, values="falling"),
]
EDGES = [
    *(
        _case(*s, k=k, tags="edge")
        for s, k in (((1,), 1), ((0, 5), 2), ((5, 0), 0), ((3, 7), 0), ((3, 37), 37))
    ),
    *(_case(9, 65, k=4, layout=v, tags="edge") for v in ("transposed", "sliced", "expanded", "shifted")),
    _case(9, 259, k=20, values="special", tags="edge"),
    _case(9, 259, k=20, values="special", dtype="bfloat16", largest=False, tags="edge"),
    _case(3, 70001, k=500, dtype="bfloat16", tags="edge", devices=CUDA),
]
BENCHES = [
    *(_case(64, 128256, k=8, dtype=d, tags="bench", devices=CUDA) for d in ("bfloat16", "float32")),
    _case(64, 128256, k=50, dtype="bfloat16", tags="bench", devices=CUDA),
    _case(65536, 64, k=8, tags="bench", devices=CUDA),
    _case(256, 1024, k=8, tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="topk",
    summary="the k largest or smallest elements of each row, sorted, with their indices",
    formula="values, indices = first k of x in order",
    signature="topk(x, k)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x",),
    save=save,
    output_names=("values", "indices"),
    properties=(Property(name="values are elements of x in order", holds=_values_are_exact),),
    backward_note="the gradient of each value goes to its element",
)
