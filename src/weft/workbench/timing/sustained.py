"""Sustained time of power-bound calls: blocks of calls in A B B A order, with the SM clock and the energy.

A card at its power limit lowers its clock. By how much depends on the kernel, on the card's temperature and
on what ran before, so that samples of a few hundred microseconds in turn do not show what a long run of one
kernel would take. Each candidate therefore also runs alone for a while, twice: in the order A B C C B A,
which gives each of them the same mean place in time. Before a block the card cools down to the temperature
at which the first block began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import numpy as np

from weft.machine.clocks import Sampler
from weft.workbench.timing.plan import RunTimes

_now = time.perf_counter_ns
_pause = time.sleep

POWER_BOUND_SHARE = 0.25  # of the readings beside a candidate's samples: the power limit held the clock down
RUN_US = 50_000.0  # one run of calls between two readings
MAX_REPEATS = 10_000
WARMER = 1.0  # degrees Celsius above the first block's start, at which another one may begin
COOLING_SECONDS = 3.0  # at most, before a block


class Repeatable(Protocol):
    """Timed candidate that can repeat its calls; times are us for a call."""

    @property
    def calls(self) -> int: ...
    def sample(self) -> float: ...
    def repeat(self, repeats: int, warm: bool) -> RunTimes: ...


@dataclass(frozen=True, kw_only=True)
class Block:
    """Calls of one candidate back to back: ``us`` and ``joules`` for each call, and the state of the card.

    ``sm_mhz`` is the median of the readings, ``temp_c`` the temperature when the block began. None: unknown.
    """

    us: float
    sm_mhz: float | None
    joules: float | None
    temp_c: float | None


def is_power_bound(readings: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the power limit held the clock down beside a quarter of the samples."""
    capped = sum("sw_power_cap" in r.get("throttle", ()) for r in readings)
    return bool(readings) and capped >= POWER_BOUND_SHARE * len(readings)


def blocks_in_turn(
    candidates: Mapping[str, Repeatable], order: Sequence[str], sampler: Sampler, seconds: float
) -> Iterator[tuple[str, Callable[[], Block]]]:
    """Yield names with the function that runs their next block: in this ``order``, then in reverse.

    The caller runs each function, which raises what a call raises, before it asks for the next.
    """
    start_temp: float | None = None
    for name in (*order, *reversed(order)):
        cool_down(sampler, start_temp)
        start_temp = sampler.read().get("temp_c") if start_temp is None else start_temp
        yield name, lambda timed=candidates[name]: run_block(timed, sampler, seconds)  # type: ignore[misc]


def cool_down(sampler: Sampler, start_temp: float | None) -> None:
    """Wait until the card is no warmer than ``start_temp`` by more than a degree, three seconds at most."""
    deadline = _now() + int(COOLING_SECONDS * 1e9)
    while start_temp is not None and _now() < deadline:
        temp = sampler.read().get("temp_c")
        if temp is None or temp <= start_temp + WARMER:
            return
        _pause(0.02)


def run_block(timed: Repeatable, sampler: Sampler, seconds: float) -> Block:
    """Run the calls of a sample back to back for ``seconds``, without a flush between them."""
    sample_us = max(1.0, timed.sample() * timed.calls)
    repeats = min(MAX_REPEATS, max(1, round(RUN_US / sample_us)))
    temp = sampler.read().get("temp_c")
    clocks: list[float] = []
    spent_us, n_calls = 0.0, 0
    energy = sampler.joules()
    deadline = _now() + int(seconds * 1e9)
    while not n_calls or _now() < deadline:
        spent_us += timed.repeat(repeats, warm=False).total_us
        n_calls += repeats * timed.calls
        # Right after the run: the clock rises a millisecond after the load ends.
        mhz = sampler.read().get("sm_mhz")
        clocks += [] if mhz is None else [float(mhz)]
    after = sampler.joules()
    return Block(
        us=spent_us / n_calls,
        sm_mhz=float(np.median(clocks)) if clocks else None,
        joules=None if energy is None or after is None else (after - energy) / n_calls,
        temp_c=temp,
    )


def summarise_blocks(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the mean of each figure over the blocks, None where one is unknown, and the blocks as lists."""

    def mean(values: Sequence[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return float(np.mean(known)) if len(known) == len(values) else None

    return {
        "us": mean([b.us for b in blocks]),
        "sm_mhz": mean([b.sm_mhz for b in blocks]),
        "joules": mean([b.joules for b in blocks]),
        "blocks": [list(astuple(b)) for b in blocks],
    }
