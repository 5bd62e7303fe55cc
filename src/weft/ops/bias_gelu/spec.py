"""Bias and GELU in one pass: y = gelu(x + bias), bias over the last dimension, GELU's tanh form.

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, WeftError, case
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._shared import validate
from weft.ops._shared.terms import finite, slope_terms

DTYPES = ("float32", "float16", "bfloat16")


def reference(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    v = x + bias
    u = math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)
    return 0.5 * v * (1 + torch.tanh(u))


def gradient_scale(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """|g| times the terms of GELU's slope, for x; the bias's gradient, their sum, has its own."""
    return finite(grad.abs() * slope_terms(x + bias)), None


def check_arguments(x: Any, bias: Any) -> None:
    validate.tensor("bias_gelu", "x", x, DTYPES, dims=range(1, 65))
    validate.tensor("bias_gelu", "bias", bias, DTYPES, dims=range(1, 2))
    validate.same("bias_gelu", "x and bias", x, bias)
    if bias.shape[0] != x.shape[-1]:
        raise WeftError(
            "bias_gelu: one bias a column",
            expected=f"bias of shape ({x.shape[-1]},), as x has {x.shape[-1]} columns",
            got=tuple(bias.shape),
        )


def cost(c: Case, direction: str) -> Cost:
    """Forward reads x and the bias and writes y; backward reads the gradient as well and writes the
    gradients of x and of the bias."""
    x, bias = c.inputs
    out = x.numel * ITEMSIZE[x.dtype]
    if direction == FORWARD:
        return Cost(read=x.nbytes + bias.nbytes, written=out)
    return Cost(read=x.nbytes + bias.nbytes + out, written=out + bias.nbytes)


def _case(
    *shape: int,
    dtype: str = "float32",
    layouts: tuple[str, str] = ("contiguous", "contiguous"),
    values: str = "normal",
    **more: Any,
) -> Case:
    x = Input(name="x", shape=shape, dtype=dtype, layout=layouts[0], values=values)
    bias = Input(name="bias", shape=shape[-1:], dtype=dtype, layout=layouts[1])
    parts = [SHORT[dtype], "x".join(map(str, shape))]
    if layouts != ("contiguous", "contiguous"):
        parts.append("-".join(layouts))
    if values != "normal":
        parts.append(values)
    return case(x, bias, name="-".join(parts), **more)


CHECKS = [
    *(_case(37, 65, dtype=d) for d in DTYPES),
    _case(3, 5, 136, dtype="float16"),
    _case(64, 32, values="sweep"),
    _case(1, 300),
    *(_case(4097, s, dtype="bfloat16", devices=("cuda",)) for s in (1000, 3072)),
    _case(2049, 768, devices=("cuda",)),
]
EDGES = [
    *(_case(*s, tags="edge") for s in ((1,), (0, 5), (5, 0))),
    *(
        _case(19, 64, layouts=k, tags="edge")
        for k in (("transposed", "contiguous"), ("sliced", "shifted"), ("expanded", "sliced"))
    ),
    _case(9, 136, dtype="bfloat16", layouts=("shifted", "contiguous"), tags="edge"),
    _case(7, 37, dtype="float16", values="special", tags="edge"),
]
BENCHES = [
    _case(65536, 3072, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(16384, 16384, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(16384, 3072, tags="bench", devices=("cuda",)),
    _case(1024, 3072, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(1024, 1024, tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="bias_gelu",
    summary="bias and GELU (tanh form) in one pass",
    formula="y = gelu(x + bias)",
    signature="bias_gelu(x, bias)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "bias"),
    gradient_scale=gradient_scale,
    scale_reason="the terms of GELU's slope cancel near -0.75, and 1 - t^2 in the tail, each "
    "rounded before",
)
