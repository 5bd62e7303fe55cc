"""What the linear operators share: their arguments, their cases' form, their work, their tolerance.

A weight is (N, K), as ``torch.nn.Linear`` stores it; ``x`` has any number of leading dimensions,
which count as M rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from weft.core import Case, Cost, Input, Tolerance, WeftError
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._shared import validate

DTYPES = ("float32", "float16", "bfloat16")

TOLERANCE = Tolerance(
    c=6.0,
    baseline="torch",
    reason="as matmul's: the library's own call is the yardstick, since eager rounds once more; in "
    "fp32 the library splits K where one straight sum errs more (measured on a GPU: 4.1 times)",
)


def check_arguments(where: str, x: Any, weight: Any, bias: Any) -> None:
    """Raise :class:`WeftError` unless x (..., K), weight (N, K) and bias (N,) go together."""
    for name, t, dims in (
        ("x", x, range(1, 65)),
        ("weight", weight, range(2, 3)),
        ("bias", bias, range(1, 2)),
    ):
        validate.tensor(where, name, t, DTYPES, dims=dims)
    validate.same(where, "x and weight", x, weight)
    validate.same(where, "x and bias", x, bias)
    if x.shape[-1] != weight.shape[1]:
        raise WeftError(
            f"{where}: the inner sizes",
            expected="x (..., K) and weight (N, K)",
            got=f"{tuple(x.shape)} and {tuple(weight.shape)}",
            hint="weight.t() turns a (K, N) weight round without a copy",
        )
    if bias.shape[0] != weight.shape[0]:
        raise WeftError(
            f"{where}: bias.shape", expected=f"({weight.shape[0]},)", got=tuple(bias.shape)
        )


def check_residual(where: str, x: Any, weight: Any, residual: Any) -> None:
    """Raise :class:`WeftError` unless residual has the shape of the product."""
    validate.tensor(where, "residual", residual, DTYPES)
    validate.same(where, "x and residual", x, residual)
    wanted = (*x.shape[:-1], weight.shape[0])
    if tuple(residual.shape) != wanted:
        raise WeftError(f"{where}: residual.shape", expected=wanted, got=tuple(residual.shape))


def sizes(c: Case) -> tuple[int, int, int]:
    """(M, N, K) of a case."""
    x, weight = c.inputs[:2]
    return math.prod(x.shape[:-1]), weight.shape[0], weight.shape[1]


def product_cost(c: Case, products: int, read: int, written: int) -> Cost:
    """A cost of ``products`` times 2 M N K FLOPs, and so many elements read and written."""
    m, n, k = sizes(c)
    item = ITEMSIZE[c.dtype]
    flops = 2.0 * products * m * n * k
    return Cost(read=read * item, written=written * item, flops=flops, rate=SHORT[c.dtype])


def make_case(
    rows: int | tuple[int, ...],
    n: int,
    k: int,
    dtype: str = "float32",
    *,
    residual: bool = False,
    layouts: tuple[str, str] = ("contiguous", "contiguous"),
    values: str = "normal",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
    **params: object,
) -> Case:
    """A case named by dtype and M x N x K; ``layouts`` are x's and the weight's."""
    lead = rows if isinstance(rows, tuple) else (rows,)
    parts = [SHORT[dtype], "x".join(map(str, (*lead, n, k)))]
    if layouts != ("contiguous", "contiguous"):
        parts.append("-".join(layouts))
    if values != "normal":
        parts.append(values)
    parts += [name if value else f"no-{name}" for name, value in params.items()]
    inputs = [
        Input(name="x", shape=(*lead, k), dtype=dtype, layout=layouts[0], values=values),
        Input(name="weight", shape=(n, k), dtype=dtype, layout=layouts[1]),
        Input(name="bias", shape=(n,), dtype=dtype),
    ]
    if residual:
        inputs.append(Input(name="residual", shape=(*lead, n), dtype=dtype, layout=layouts[0]))
    return Case(
        name="-".join(parts),
        inputs=tuple(inputs),
        params=params,
        tags=frozenset({tags}),
        devices=devices,
    )


class Operands(NamedTuple):
    """What a product's launch is given: x (M, K), weight (N, K), bias (N,), and the residual, y and
    what is kept of it, (M, N)."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    residual: torch.Tensor | None
    y: torch.Tensor
    pre: torch.Tensor | None


def pitch_of(x: torch.Tensor) -> int:
    """Elements from a row of (..., C) to the next; of more dimensions than two it has no gaps."""
    return x.stride(0) if x.dim() == 2 else x.shape[-1]


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """(..., K) as (M, K), a view where the strides allow one."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
