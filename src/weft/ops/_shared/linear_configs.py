"""Configurations of the linear operators' Triton product: those worth timing, those shipped.

K is short in a transformer (768), and what a tile's epilogue takes is hidden only if another tile's
product runs meanwhile. Two programs a multiprocessor (``resident=2``, 128 x 128 tiles of 4 warps)
do so for each other, and read 1.2 GB from the L2 for 16384 x 3072 x 768; one of 128 x 256 reads a
quarter less and waits for its epilogue. GELU wants the first, a bias alone the second, and on
compute capability 9.0 both are behind two groups of warps that take turns (linear_turns.py):
results' sweep-linear.ndjson and sweep-linear-2026-11-22.ndjson.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.ops._shared import linear_kernels as kernels

BIAS, GELU, GELU_KEEP, RESIDUAL = (
    int(e.value) for e in (kernels.BIAS, kernels.GELU, kernels.GELU_KEEP, kernels.RESIDUAL)
)
MATHS = {
    "unit": int(kernels.UNIT.value),
    "paired": int(kernels.PAIRED.value),
    "tanh": int(kernels.TANH.value),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """One way to launch: a ``bm x bn`` tile by ``warps`` warps, ``bk`` of K at a time.

    ``stages`` tiles of K are in flight. ``descriptors`` names the kernel; the rest is for that one:
    ``resident`` programs a multiprocessor that take tile after tile, a tile finished in ``parts``
    (1, 2 or 4), ``flatten`` for the two loops made one, ``bring`` for the bias prefetched,
    ``math`` for GELU's arithmetic: ``unit``, ``paired`` or ``tanh`` (see linear_kernels.py),
    ``aside`` for what is kept stored by plain pointers, past the copy engine. ``turns`` is the
    kernel of linear_turns.py, 128 x 128 tiles on compute capability 9.0 alone, with no residual.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 8
    descriptors: bool = True
    resident: int = 1
    parts: int = 2
    flatten: bool = True
    bring: bool = False
    math: str = "unit"
    aside: bool = False
    turns: bool = False

    def __post_init__(self) -> None:
        if self.math not in MATHS:
            raise ValueError(f"math: expected one of {', '.join(MATHS)}, got {self.math!r}")


def _wide(stages: int, **more: Any) -> Config:
    return Config(bm=128, bn=256, bk=64, warps=8, stages=stages, **more)


def _pair(**more: Any) -> Config:
    return Config(bm=128, bn=128, bk=64, warps=4, stages=3, resident=2, **more)


def _three(**more: Any) -> Config:
    return Config(bm=128, bn=128, bk=64, warps=4, stages=2, resident=3, parts=4, **more)


def _pointers(bm: int, bn: int, bk: int, warps: int, stages: int) -> Config:
    return Config(bm=bm, bn=bn, bk=bk, warps=warps, stages=stages, descriptors=False)


def _turns(**more: Any) -> Config:
    return Config(bm=128, bn=128, bk=64, warps=4, turns=True, **{"stages": 6, "parts": 4, **more})


SQUARE = Config(bm=128, bn=128, bk=64, warps=8, stages=3, parts=4)
TALL = Config(bm=256, bn=128, bk=64, warps=8, stages=4, parts=4)
LONG = _wide(4, parts=4)
SMALL = _pointers(64, 64, 64, 4, 3)
SINGLE = _pointers(64, 64, 16, 4, 3)
# For half types, by epilogue: the first whose least count of 128 x 128 tiles a product has. Where
# strides or device allow no descriptor, DIRECT holds; float32 is summed by fma, in SINGLE. What
# takes turns is passed over on a device or a Triton that it is not for.
SHIPPED = {
    BIAS: (
        (132, _turns()),
        (264, replace(LONG, group=4)),
        (132, _pair(parts=4)),
        (32, SQUARE),
        (0, SMALL),
    ),
    GELU: (
        (132, _turns(math="tanh")),
        (132, _pair(parts=4, math="tanh")),
        (32, SQUARE),
        (0, SMALL),
    ),
    GELU_KEEP: (
        (132, _turns(math="tanh")),
        (132, _pair(math="tanh")),
        (32, SQUARE),
        (0, SMALL),
    ),
    RESIDUAL: ((132, replace(LONG, group=4)), (32, SQUARE), (0, SMALL)),
}
DIRECT = ((64, _pointers(128, 128, 64, 8, 3)), (0, SMALL))
INTERPRETED_DESCRIPTORS = Config(bm=32, bn=64, bk=32, warps=4, stages=2)


def worth_timing(epilogue: int, dtype: torch.dtype) -> tuple[Config, ...]:
    """The configurations worth timing for an epilogue and dtype, in the order of promise."""
    if dtype == torch.float32:
        return (SINGLE, _pointers(64, 128, 16, 8, 3), _pointers(128, 64, 16, 8, 3))
    if epilogue == RESIDUAL:  # whose tile in shared memory leaves no room for parts=2
        return (
            replace(LONG, group=4),
            _wide(3, parts=4),
            LONG,
            replace(LONG, bring=True),
            replace(LONG, group=16),
            TALL,
            _pair(parts=4, bring=True),
            _pair(parts=4),
        )
    if epilogue == BIAS:
        return (
            _turns(),
            _wide(4, group=4),
            _wide(4),
            replace(LONG, group=4),
            LONG,
            _wide(3),
            _pair(parts=4, bring=True),
            _pair(parts=4),
            _pair(),
        )
    likely = [
        *(_pair(parts=4), _pair(), _wide(4), replace(LONG, bring=True)),
        *(_pair(group=4), _pair(group=16), _pair(bring=True), _pair(flatten=False)),
    ]
    if epilogue == GELU:
        likely.insert(2, _three())  # with two answers its registers leave no room for a third
    else:  # every store by descriptor waits until the one before it has been read
        likely[:0] = [replace(c, aside=True) for c in (_pair(parts=4), LONG, _wide(3))]
    likely[:0] = [_turns(), _turns(stages=5, parts=2), _turns(group=16), _turns(group=4)]
    return tuple(replace(c, math="tanh") for c in likely)
