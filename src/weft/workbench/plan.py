"""The clock's words: candidate, budget, plan, outcome; and the guard of its own functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.core import Timing
from weft.workbench.slots import Result, Slot

# The clock's own functions, bound when this module is imported, which is before any candidate
# runs; `replaced` looks whether somebody put others in their place.
_OWN: dict[str, tuple[object, str, object]] = {
    f"{label}.{name}": (owner, name, getattr(owner, name))
    for label, owner, names in (
        ("time", time, ("perf_counter_ns", "perf_counter", "process_time_ns", "sleep")),
        ("torch", torch, ("equal", "isnan")),
        ("torch.cuda", torch.cuda, ("synchronize", "Event", "CUDAGraph", "current_stream")),
        ("torch.cuda.Event", torch.cuda.Event, ("record", "elapsed_time", "query")),
        ("torch.cuda.CUDAGraph", torch.cuda.CUDAGraph, ("replay",)),
    )
    for name in names
    if hasattr(owner, name)
}

SHORTEST = 50.0  # us that a sample must last
AIM = 200.0  # us that it is planned for
MOST_CALLS = 256
CROSS_TRIES = 3  # times that two clocks may disagree before it is called suspect


class ClockReplaced(RuntimeError):
    """One of the clock's own functions is no longer the one bound at import."""


class CannotTime(RuntimeError):
    """A candidate that can be checked but not timed; the message says why."""


def replaced() -> list[str]:
    """The names of the clock's functions that somebody has replaced since import."""
    return [n for n, (owner, name, own) in _OWN.items() if getattr(owner, name, None) is not own]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What is timed: ``bind(slot)`` gives the closure that computes one call on a slot's inputs.

    ``first`` is the wall time (us) of the very first call in this process, which only the caller
    can have seen.
    """

    name: str
    bind: Callable[[Slot], Callable[[], Result]]
    first: float | None = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to measure one case in one direction, all candidates together.

    Sampling stops for a candidate when its interval is under ``width`` with at least ``minimum``
    samples; for all at ``seconds`` or ``maximum`` rounds, and the rest is flagged ``noisy``. Once
    re-checking one candidate has taken ``recheck`` seconds, two turns are enough.
    """

    seconds: float = 20.0
    warmup: float = 1.0
    minimum: int = 20
    maximum: int = 400
    width: float = 0.005
    side_samples: int = 10
    recheck: float = 10.0

    @staticmethod
    def of(device: str, quick: bool = False) -> Budget:
        """The default of a device ('cuda' or 'cpu')."""
        if device == "cuda":
            return Budget(seconds=3.0, warmup=0.3) if quick else Budget()
        seconds, warmup = (0.5, 0.05) if quick else (1.2, 0.1)
        return Budget(seconds=seconds, warmup=warmup, maximum=200, side_samples=5, recheck=1.0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many calls one sample holds, and whether the cache is flushed before it.

    Without a flush the calls' inputs and outputs are together at least twice the cache, so that
    each call finds the cache as the call before it leaves it and nothing of its own.
    """

    calls: int
    flush: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What measuring one candidate came to.

    ``refusal``: its timed calls were wrong, so the verdict is fail. ``trouble``: it could not be
    timed (out of memory, raised), which says nothing of its answers.
    """

    timing: Timing | None = None
    refusal: str = ""
    trouble: str = ""


class Rig(Protocol):
    """A candidate made ready on its slots. Times are in us a call."""

    plan: Plan
    flags: set[str]

    @property
    def calls(self) -> int: ...
    def sample(self) -> float: ...
    def warm(self) -> float: ...
    def host(self) -> float: ...
    def cross_check(self) -> list[str]: ...
    def replay(self) -> list[Result]: ...
    def call(self, index: int) -> Result: ...
    def wait(self) -> None: ...


class Stand(Protocol):
    """Where rigs are made: one device."""

    cache: int
    overhead: float
    slow: float

    def context(self) -> AbstractContextManager[None]: ...
    def memory(self) -> int: ...
    def estimate(self, candidate: Candidate, slot: Slot) -> float: ...
    def rig(self, candidate: Candidate, slots: Sequence[Slot], plan: Plan) -> Rig: ...


def plan(footprint: int, cache: int, call_us: float, *, slow_us: float, fits: int) -> Plan:
    """How to sample a call of ``call_us`` that touches ``footprint`` bytes.

    Rotation over distinct slots where ``fits`` of them suffice for twice the ``cache`` and a
    sample does not last over ``slow_us`` (two calls may); else fewer calls and a flush before.
    """
    rotate = max(2, -(-2 * cache // max(1, footprint)))
    want = max(1, int(-(-AIM // max(call_us, 0.1))))
    most = max(1, min(MOST_CALLS, fits))
    if rotate <= most and max(rotate - 1, 1) * call_us <= slow_us:
        return Plan(calls=min(max(rotate, want), most), flush=False)
    return Plan(calls=min(want, most), flush=True)
