"""Rotary position embedding: each pair of a head's elements is rotated by its position's angle.

With a pair (a, b) and its angle's cosine c and sine s: (a c - b s, b c + a s). The pairs are (x[i],
x[i + D/2]), as in Llama, or (x[2i], x[2i + 1]), as in GPT-J (``interleaved``). Source: Su et al.,
"RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv:2104.09864).
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import Case, Cost, Input, Operator, WeftError, case
from weft.core.cases import ITEMSIZE
from weft.ops._common import validate

DTYPES = ("float32", "float16", "bfloat16")


def reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """Save the tables alone: the backward rotates by the negative angles and needs no x."""
    return inputs[1:]


def check_arguments(x: Any, cos: Any, sin: Any, *, interleaved: bool = False) -> None:
    validate.tensor("rope", "x", x, DTYPES, dims=range(4, 5))
    for name, table in (("cos", cos), ("sin", sin)):
        validate.tensor("rope", name, table, ("float32",), dims=range(2, 3))
        validate.same_device("rope", f"x and {name}", x, table)
    validate.flag("rope: interleaved", interleaved)
    if x.shape[3] % 2:
        raise WeftError("rope: x.shape[3]", expected="an even head size", got=x.shape[3])
    for name, table in (("cos", cos), ("sin", sin)):
        expected_shape = (x.shape[2], x.shape[3] // 2)
        if tuple(table.shape) != expected_shape:
            raise WeftError(
                f"rope: {name}.shape",
                expected=f"(T, D/2) = {expected_shape}, since x is {tuple(x.shape)}",
                got=tuple(table.shape),
                hint=f"{name}[:T, : D // 2], of the positions that x holds",
            )


def cost(c: Case, direction: str) -> Cost:
    """Both directions read x (or the gradient) and both tables once and write one tensor of x's size."""
    x, *tables = c.inputs
    size = x.numel * ITEMSIZE[x.dtype]
    read = x.nbytes if direction == "forward" else size
    return Cost(read=read + sum(t.nbytes for t in tables), written=size)


def _case(
    *shape: int,
    dtype: str = "float32",
    layout: str = "contiguous",
    values: str = "normal",
    interleaved: bool = False,
    **options: Any,
) -> Case:
    """Return a case named by x alone: the shapes of the tables follow from it."""
    x = Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values)
    table = (shape[2], shape[3] // 2)
    name = case(x).name + ("-interleaved" if interleaved else "")
    tables = (Input(name=n, shape=table) for n in ("cos", "sin"))
    return case(x, *tables, name=name, interleaved=interleaved, **options)


CHECKS = [
    *(_case(2, 3, 9, 16, dtype=d, interleaved=i) for d in DTYPES for i in (False, True)),
    # Half of the head, 3, is odd: no vector of two or more elements fits.
    _case(1, 5, 7, 6),
    _case(1, 2, 5, 22, interleaved=True),
    *(
        _case(2, 13, 515, n, dtype=d, interleaved=i, devices=("cuda",))
        for d, n, i in (("bfloat16", 128, False), ("float32", 64, True), ("float16", 80, False))
    ),
]
EDGES = [
    *(_case(*s, tags="edge") for s in ((0, 2, 3, 4), (2, 3, 0, 4), (1, 1, 1, 2), (1, 2, 3, 0))),
    # Heads as views of one product's output have such strides.
    *(_case(2, 3, 5, 16, layout=k, tags="edge") for k in ("transposed", "shifted")),
    _case(2, 3, 5, 16, layout="shifted", interleaved=True, tags="edge"),
    _case(2, 2, 6, 8, dtype="float16", values="special", tags="edge"),
]
BENCHES = [
    *(
        _case(*s, dtype="bfloat16", interleaved=i, tags="bench", devices=("cuda",))
        for s, i in (
            ((4, 32, 4096, 128), False),
            ((4, 32, 4096, 128), True),
            ((64, 12, 1024, 64), False),
        )
    ),
    _case(1, 8, 256, 64, tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="rope",
    summary="rotary position embedding",
    formula="(a, b) -> (a cos - b sin, b cos + a sin)",
    signature="rope(x, cos, sin, interleaved=False)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x",),
    rows=("x",),
    save=save,
    backward_note="the rotation by the negative angle, from cos and sin alone",
)
