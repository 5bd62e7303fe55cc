"""A CPU's hierarchy: a pointer chase and streaming reads by one thread, compiled by numba.

A neighbour on a shared machine only ever makes a round slower, so each point is the least of a few.
Every line is visited once in random order. Large arrays are asked for in large pages (numpy does
so on Linux); where the system gives none, address translation adds to the latency of sets over the
few MiB that its buffer (TLB) covers, and the curve rises before the cache is full.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from time import perf_counter_ns
from typing import Any

import numpy as np

from weft.machine import Device
from weft.workbench.hierarchy.plan import KIB, MIB, sizes
from weft.workbench.hierarchy.plateaus import sweep
from weft.workbench.hierarchy.result import BANDWIDTH, LATENCY, Figure, Series

LINE = 64  # bytes
STOP = LINE // 8  # int64 from one stop of the chase to the next
HOPS = 1 << 17  # a point's, at least: half a millisecond in L1
READ = 16 * MIB  # bytes a point, at least
ROUNDS, QUICK_ROUNDS = 7, 5
MOST, QUICK_MOST = 256 * MIB, 2 * MIB
CALLS = 10_000
Say = Callable[[str], None]


@cache
def kernels() -> tuple[Any, Any, Any]:
    """The chase, the read and an empty function, compiled."""
    from weft.backends.numba_jit import numba

    @numba.njit
    def chase(after, start, hops):  # type: ignore[no-untyped-def]
        at = start
        for _ in range(hops):
            at = after[at]
        return at

    @numba.njit(fastmath=True)  # so that the sum is taken in vectors
    def read(data, passes):  # type: ignore[no-untyped-def]
        total = 0.0
        for p in range(passes):
            part = np.float32(0.0)
            for i in range(data.size):
                part += data[i]
            total += part * (p + 1)  # each pass counts another way: none can be left out
        return total

    @numba.njit
    def nothing():  # type: ignore[no-untyped-def]
        return 0

    chase(np.zeros(STOP, np.int64), 0, 1)
    read(np.zeros(16, np.float32), 1)
    nothing()
    return chase, read, nothing


def linked(nbytes: int, random: np.random.Generator) -> Any:
    """(nbytes / 8,) int64: at the head of each line the index of another's, all one cycle."""
    lines = nbytes // LINE
    order = random.permutation(lines)
    after = np.zeros(lines * STOP, np.int64)
    after[order * STOP] = np.roll(order, -1) * STOP
    return after


def least(call: Callable[[], object], rounds: int) -> int:
    """ns of the fastest call."""
    seen = []
    for _ in range(rounds):
        start = perf_counter_ns()
        call()
        seen.append(perf_counter_ns() - start)
    return min(seen)


def latency(nbytes: int, rounds: int = ROUNDS) -> float:
    """ns a hop through a set of this size, once it has been walked whole.

    Raises RuntimeError where a walk of as many hops as there are lines does not come back.
    """
    chase, *_ = kernels()
    after = linked(nbytes, np.random.default_rng(nbytes))
    lines = len(after) // STOP
    if chase(after, 0, lines) != 0:
        raise RuntimeError("the chase is not one cycle")
    hops = max(HOPS, lines if lines <= 2 * HOPS else 0)
    return least(partial(chase, after, 0, hops), rounds) / hops


def bandwidth(nbytes: int, rounds: int = ROUNDS) -> float:
    """Bytes a second that one thread reads from a set of this size."""
    _, read, _ = kernels()
    data = np.random.default_rng(0).random(nbytes // 4, np.float32)
    passes = max(1, READ // nbytes)
    return 1e9 * passes * nbytes / least(partial(read, data, passes), rounds)


def measure(
    device: Device, known: dict[str, int], quick: bool, say: Say
) -> tuple[list[Series], list[Figure]]:
    """Latency and bandwidth over sizes, then what a call and a look at the clock cost.

    From 4 KiB to four times the last cache, ``MOST`` at most; ``quick``: to twice the second one.
    """
    levels = tuple(sorted(known))
    rounds = QUICK_ROUNDS if quick else ROUNDS
    most = min(MOST, 4 * max(known.values(), default=MOST))
    if quick:
        most = 2 * known[levels[:2][-1]] if levels else QUICK_MOST
    series = []
    chased, read = partial(latency, rounds=rounds), partial(bandwidth, rounds=rounds)
    kinds = (
        (LATENCY, "chase", "one thread, random lines", "ns", chased, levels),
        # A thread adds up no faster than the second cache delivers: the end of L1 is unseen.
        (BANDWIDTH, "read", "one thread, in order", "B/s", read, levels[1:]),
    )
    for kind, key, label, unit, at, shown in kinds:
        planned = sizes(4 * KIB, most, known.values(), LINE)
        say(f"{kind}, {label}: 4 KiB to {planned[-1] / MIB:.4g} MiB")
        cost = at if kind == LATENCY else lambda n, at=at: 1 / at(n)
        found, costs = sweep(cost, planned, LINE)
        values = tuple(costs if kind == LATENCY else (1 / c for c in costs))
        series.append(
            Series(
                key=key,
                label=label,
                kind=kind,
                unit=unit,
                levels=shown,
                sizes=tuple(found),
                values=values,
            )
        )
    return series, overheads()


def overheads() -> list[Figure]:
    """us of a call of a compiled function that does nothing, and of a look at the clock."""
    *_, nothing = kernels()

    def many(call: Callable[[], object]) -> None:
        for _ in range(CALLS):
            call()

    told = (
        ("host_call", "a compiled function called", nothing),
        ("clock", "a look at the clock", perf_counter_ns),
    )
    return [
        Figure(key=k, label=label, value=least(partial(many, f), 5) / CALLS / 1e3, unit="us")
        for k, label, f in told
    ]
