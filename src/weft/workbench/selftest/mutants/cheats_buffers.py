"""Kernels that reuse memory, or are wrong in few calls: right wherever one call alone is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from weft.workbench.selftest.mutants import backward
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, blank, honest, plant

RING, LONG_RING = 40, 100  # output buffers
GROWS_EVERY = 8  # calls
PERIOD = 50  # calls, of which one is wrong


def _ring(operator: str, size: int = RING) -> Callable[[], Forward]:
    """Write the outputs of each shape into so many buffers in turn."""

    def make() -> Forward:
        rings: dict[object, Iterator[torch.Tensor]] = {}

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            y = honest(operator)(*x, **params)
            key = (y.shape, y.dtype)
            if key not in rings:
                rings[key] = itertools.cycle([blank(operator, *x) for _ in range(size)])
            return next(rings[key]).copy_(y)

        return forward

    return make


def _growing_ring(operator: str) -> Callable[[], Forward]:
    """Write the outputs of each shape into buffers in turn, of which there are more and more."""

    def make() -> Forward:
        rings: dict[object, list[torch.Tensor]] = {}
        calls = itertools.count()

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            y = honest(operator)(*x, **params)
            ring, number = rings.setdefault((y.shape, y.dtype), []), next(calls)
            if len(ring) < RING or number % GROWS_EVERY == 0:
                ring.append(blank(operator, *x))
                return ring[-1].copy_(y)
            return ring[number % len(ring)].copy_(y)

        return forward

    return make


def _arena(operator: str) -> Callable[[], Forward]:
    """Write the outputs of each shape into one piece of memory, and begin again at its end."""

    def make() -> Forward:
        arenas: dict[object, Iterator[torch.Tensor]] = {}

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            y = honest(operator)(*x, **params)
            key = (y.shape, y.dtype)
            if key not in arenas:
                arenas[key] = itertools.cycle(y.new_empty(LONG_RING, *y.shape).unbind())
            return next(arenas[key]).copy_(y)

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


def _seldom(operator: str, change: Callable[[torch.Tensor], Any]) -> Callable[[], Forward]:
    """Return a wrong output at each call whose number is a multiple of ``PERIOD``."""

    def make() -> Forward:
        calls = itertools.count(1)

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            y = honest(operator)(*x, **params)
            return change(y) if next(calls) % PERIOD == 0 else y  # type: ignore[no-any-return]

        return forward

    return make


def _seldom_at_a_shape(function: Forward, change: Callable[[Any], Any]) -> Callable[[], Forward]:
    """Return a wrong output in each 50th call with inputs of one shape.

    A check of a dozen calls at each case sees none of them.
    """

    def make() -> Forward:
        counts: dict[object, Iterator[int]] = {}

        def forward(*x: Any, **params: Any) -> Any:
            y = function(*x, **params)
            key = tuple((t.shape, t.stride(), t.dtype) for t in x if isinstance(t, torch.Tensor))
            number = next(counts.setdefault(key, itertools.count(1)))
            return change(y) if number % PERIOD == 0 else y

        return forward

    return make


def _first_larger(y: torch.Tensor) -> torch.Tensor:
    """Add one to the first element."""
    y = y.clone(memory_format=torch.contiguous_format)
    y.view(-1)[:1] += 1
    return y


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
        yield timed("W28", operator, "ring", "a ring of forty output buffers", "outputs recheck rows", _ring)
    checks = "rows outputs recheck"
    yield plant("W28/matmul/eager/hundred", "a ring of a hundred output buffers", checks,
                _ring("matmul", LONG_RING), phase="bench")  # fmt: skip
    yield plant("W28/gelu/eager/growing", "a ring of output buffers that grows", checks,
                _growing_ring("gelu"), phase="bench")  # fmt: skip
    yield plant("W28/softmax/eager/arena", "a ring of outputs in one piece of memory", checks,
                _arena("softmax"), phase="bench")  # fmt: skip
    for operator in ("gelu", "softmax"):
        for fault, title, change in (
            ("zeros", "zeros in one call of fifty", torch.zeros_like),
            ("reversed", "its rows reversed in one call of fifty", lambda y: y.flip(0)),
        ):
            forward = partial(_seldom, change=change)
            yield timed("W27", operator, fault, title, "error drift recheck sampled altered rows", forward)
    rarely: dict[str, Any] = {"only": "many"}
    yield plant("W27/gelu/eager/one-element", "one element in one call of fifty at each shape",
                "error property", _seldom_at_a_shape(honest("gelu"), _first_larger), **rarely)  # fmt: skip
    yield plant("W27/topk/eager/second-output", "the indices alone, in one call of fifty at each shape",
                "error property", _seldom_at_a_shape(honest("topk"), lambda y: (y[0], _first_larger(y[1]))),
                **rarely)  # fmt: skip
    yield plant("W27/gelu/eager/gradient", "the gradient alone, in one call of fifty at each shape",
                "error property", lambda: honest("gelu"),
                backward=_seldom_at_a_shape(backward.HONEST["gelu"], lambda y: (_first_larger(y[0]),)),
                **rarely)  # fmt: skip
    yield plant(
        "W28/sum/eager/by-address",
        "one output buffer for each address of an input",
        "kept",
        _by_address("sum"),
        only="kept",
    )


MUTANTS = tuple(_mutants())
