"""Kernels that reuse memory, or are wrong in few calls: right wherever one call alone is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, blank, honest, plant

RING = 40  # output buffers


def _ring(operator: str) -> Callable[[], Forward]:
    """Write the outputs of each shape into forty buffers in turn."""

    def make() -> Forward:
        rings: dict[object, Iterator[torch.Tensor]] = {}

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            y = honest(operator)(*x, **params)
            key = (y.shape, y.dtype)
            if key not in rings:
                rings[key] = itertools.cycle([blank(operator, *x) for _ in range(RING)])
            return next(rings[key]).copy_(y)

        return forward

    return make


def _by_address(operator: str) -> Callable[[], Forward]:
    """Write the output for each address of an input into a buffer of its own."""

    def make() -> Forward:
        buffers: dict[object, torch.Tensor] = {}

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            y = honest(operator)(*x, **params)
            key = (y.shape, y.dtype, x[0].data_ptr())
            return buffers.setdefault(key, blank(operator, *x)).copy_(y)

        return forward

    return make


def _seldom(operator: str, period: int, change: Callable[[torch.Tensor], Any]) -> Callable[[], Forward]:
    """Return a wrong output at each call whose number is a multiple of ``period``."""

    def make() -> Forward:
        calls = itertools.count(1)

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            y = honest(operator)(*x, **params)
            return change(y) if next(calls) % period == 0 else y  # type: ignore[no-any-return]

        return forward

    return make


def _mutants() -> Iterator[Mutant]:
    def timed(row: str, operator: str, fault: str, title: str, checks: str, forward: Forward) -> Mutant:
        return plant(
            f"{row}/{operator}/eager/{fault}",
            title,
            checks,
            lambda: forward(operator)(),
            phase="bench",
            devices=("cpu",),
            not_here="a captured graph calls nothing in Python",
        )

    for operator in ("gelu", "softmax"):
        yield timed("W28", operator, "ring", "a ring of forty output buffers", "outputs recheck", _ring)
        for fault, title, change in (
            ("zeros", "zeros in one call of fifty", torch.zeros_like),
            ("reversed", "its rows reversed in one call of fifty", lambda y: y.flip(0)),
        ):
            forward = partial(_seldom, period=50, change=change)
            yield timed("W27", operator, fault, title, "error drift recheck sampled altered", forward)
    yield plant(
        "W28/sum/eager/by-address",
        "one output buffer for each address of an input",
        "kept",
        _by_address("sum"),
        only="kept",
    )


MUTANTS = tuple(_mutants())
