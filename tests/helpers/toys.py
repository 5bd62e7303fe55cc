"""Toy operators and cases that the planted kernels are judged at: softmax, norm, GELU and a sum."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from weft.core import Case, Cost, Input, Operator, Property, Tolerance
from weft.core import case as make_case

EPS = 1e-5


def at(*shape: int, **more: str) -> Case:
    return make_case(Input(name="x", shape=shape, **more))


PLAIN = at(37, 129)
LARGE = at(37, 129, values="large")
RISING = at(37, 129, values="rising")
OFFSET = at(37, 129, values="offset")
SPECIAL = at(37, 129, values="special")
HALF = at(37, 129, dtype="float16")
LONG = at(5, 2047, dtype="float16")
FLIPPED = at(37, 129, layout="transposed")
GAPPED = at(37, 129, layout="sliced")
EMPTY = at(0, 129)
SCALAR = at()


def softmax(x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 0:
        return torch.ones_like(x)
    e = torch.exp(x - x.amax(-1, keepdim=True)) if x.numel() else x.clone()
    return e / e.sum(-1, keepdim=True)


def norm(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + EPS)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def _operator(name: str, reference: Callable[..., torch.Tensor], **more: object) -> Operator:
    return Operator(
        name=name,
        summary=name,
        formula=name,
        signature=f"{name}(x)",
        reference=reference,
        cases=(PLAIN,),
        cost=lambda c, d: Cost(read=0, written=0),
        validate=lambda x: None,
        dtypes=("float32", "float16"),
        differentiable=("x",),
        **more,  # type: ignore[arg-type]
    )


def magnitude(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum().sqrt()


def _off_one(y: torch.Tensor, x: torch.Tensor) -> float:
    return float((y.double().sum(-1) - 1).abs().max()) / 1e-5


SOFTMAX = _operator("softmax", softmax)
NORM = _operator("norm", norm)
GELU = _operator("gelu", gelu)
TOTAL = _operator("total", total, scale=magnitude, scale_reason="a sum may cancel to nothing")
LOOSE = _operator(
    "softmax",
    softmax,
    tolerance=Tolerance(c=1e5, reason="so that only the property can tell"),
    properties=(Property(name="rows sum to 1", holds=_off_one),),
)
