"""Operators as a user's file declares them: one in place, one whose output is about 0.

They are honest, and this file is loaded like any file of a user.
"""

from __future__ import annotations

import torch

import weft


def _moved(c: weft.Case, direction: str) -> weft.Cost:
    (x,) = c.inputs
    return weft.Cost(read=x.nbytes, written=x.nbytes)


def _read(c: weft.Case, direction: str) -> weft.Cost:
    (x,) = c.inputs
    return weft.Cost(read=x.nbytes, written=4)


def _terms(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x)


def _x(*shape: int, layout: str = "contiguous") -> weft.Input:
    return weft.Input(name="x", shape=shape, layout=layout)


SHAPES = ((7, 129), (4099,), (1,), (0,), (64, 64))
CASES = [
    *(weft.case(_x(*s)) for s in SHAPES),
    weft.case(_x(33, 65, layout="transposed"), tags="edge"),
    weft.case(_x(1024, 512), tags="bench"),
]


@weft.operator("halve", cases=CASES, cost=_moved, in_place=("x",))
def halve(x: torch.Tensor) -> torch.Tensor:
    """Compute x / 2 + 1, which may be written to x itself."""
    return x / 2 + 1


@weft.implementation("halve", backend="eager", name="eager", directions=("forward",))
def apart(x: torch.Tensor) -> torch.Tensor:
    return x / 2 + 1


@weft.implementation("halve", backend="eager", name="in-place", directions=("forward",))
def in_place(x: torch.Tensor) -> None:
    x.div_(2).add_(1)


@weft.operator(
    "balance",
    cases=CASES,
    cost=_read,
    scale=_terms,
    scale_reason="the terms cancel: the answer is the rounding of a sum of nothing",
    tolerance=weft.Tolerance(chain=8.0, reason="the order of a long sum is free, as in sum"),
)
def balance(x: torch.Tensor) -> torch.Tensor:
    """Compute the sum of x minus the sum of x in reverse order: 0 except for rounding."""
    return x.sum() - x.flatten().flip(0).sum()


@weft.implementation("balance", backend="eager", name="eager", directions=("forward",))
def at_once(x: torch.Tensor) -> torch.Tensor:
    return x.sum() - x.flatten().flip(0).sum()


@weft.implementation("balance", backend="eager", name="differences", directions=("forward",))
def differences(x: torch.Tensor) -> torch.Tensor:
    return (x.flatten() - x.flatten().flip(0)).sum()


IN_PLACE, DIFFERENCES = in_place.__weft__, differences.__weft__  # type: ignore[attr-defined]
