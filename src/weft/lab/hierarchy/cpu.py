"""A CPU's hierarchy: a pointer chase and streaming reads by one thread, compiled by numba.

Other work on a shared machine only makes a round slower, so each point is the fastest of a few rounds.
The chase visits every line once in random order. numpy requests huge pages for large arrays on Linux.
Without huge pages, address translation adds to the latency of sets over the few MiB that the TLB
covers, and the curve rises before the cache is full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from time import perf_counter_ns
from typing import Any

import numpy as np

from weft.core import Log
from weft.lab.hierarchy.curves import BANDWIDTH, KIB, LATENCY, MIB, Figure, Series, sizes
from weft.lab.hierarchy.plateaus import sweep

LINE = 64  # bytes
STRIDE = LINE // 8  # int64 elements in a line
MIN_HOPS = 1 << 17  # of a point: half a millisecond in L1
MIN_READ = 16 * MIB  # bytes of a point
ROUNDS, QUICK_ROUNDS = 7, 5
MAX_SET, QUICK_MAX_SET = 256 * MIB, 2 * MIB
CALLS = 10_000


@cache
def kernels() -> tuple[Any, Any, Any]:
    """Return the chase, the read and an empty function, compiled."""
    from weft.backends.numba_jit import numba

    @numba.njit
    def chase(successors, start, hops):  # type: ignore[no-untyped-def]
        at = start
        for _ in range(hops):
            at = successors[at]
        return at

    @numba.njit(fastmath=True)  # lets the compiler reorder the sum, so that it uses vectors
    def read(data, repeats):  # type: ignore[no-untyped-def]
        total = 0.0
        for repeat in range(repeats):
            part = np.float32(0.0)
            for i in range(data.size):
                part += data[i]
            total += part * (repeat + 1)  # a weight for each repeat: the compiler cannot drop any
        return total

    @numba.njit
    def empty():  # type: ignore[no-untyped-def]
        return 0

    chase(np.zeros(STRIDE, np.int64), 0, 1)
    read(np.zeros(16, np.float32), 1)
    empty()
    return chase, read, empty


def linked_lines(nbytes: int, random: np.random.Generator) -> Any:
    """Return (nbytes / 8,) int64: each line starts with the index of the next one, in one random cycle."""
    lines = nbytes // LINE
    order = random.permutation(lines)
    successors = np.zeros(lines * STRIDE, np.int64)
    successors[order * STRIDE] = np.roll(order, -1) * STRIDE
    return successors


def fastest(call: Callable[[], object], rounds: int) -> int:
    """Return the ns of the fastest call."""
    times = []
    for _ in range(rounds):
        start = perf_counter_ns()
        call()
        times.append(perf_counter_ns() - start)
    return min(times)


def latency(nbytes: int, rounds: int = ROUNDS) -> float:
    """Return the ns of a hop through a set of this size, after one pass over the whole set.

    Raises RuntimeError if a chase of as many hops as lines does not return to its start.
    """
    chase, *_ = kernels()
    successors = linked_lines(nbytes, np.random.default_rng(nbytes))
    lines = len(successors) // STRIDE
    if chase(successors, 0, lines) != 0:
        raise RuntimeError("the chase is not one cycle")
    hops = max(MIN_HOPS, lines if lines <= 2 * MIN_HOPS else 0)
    return fastest(partial(chase, successors, 0, hops), rounds) / hops


def bandwidth(nbytes: int, rounds: int = ROUNDS) -> float:
    """Return the bytes a second that one thread reads from a set of this size."""
    _, read, _ = kernels()
    data = np.random.default_rng(0).random(nbytes // 4, np.float32)
    repeats = max(1, MIN_READ // nbytes)
    return 1e9 * repeats * nbytes / fastest(partial(read, data, repeats), rounds)


def curves(known: dict[str, int], quick: bool, log: Log) -> Iterator[Series]:
    """Yield latency and bandwidth over sizes.

    Sizes go from 4 KiB to four times the last cache, at most ``MAX_SET``; ``quick``: to twice the
    second cache.
    """
    levels = tuple(sorted(known))
    rounds = QUICK_ROUNDS if quick else ROUNDS
    most = min(MAX_SET, 4 * max(known.values(), default=MAX_SET))
    if quick:
        most = 2 * known[levels[:2][-1]] if levels else QUICK_MAX_SET
    planned = sizes(4 * KIB, most, known.values(), LINE)
    range_text = f"4 KiB to {planned[-1] / MIB:.4g} MiB"

    log(f"latency, one thread, random lines: {range_text}")
    chased, ns = sweep(partial(latency, rounds=rounds), planned, LINE)
    yield Series(
        key="chase",
        label="one thread, random lines",
        kind=LATENCY,
        unit="ns",
        levels=levels,
        sizes=tuple(chased),
        values=tuple(ns),
    )
    log(f"bandwidth, one thread, in order: {range_text}")
    read, seconds_per_byte = sweep(lambda nbytes: 1 / bandwidth(nbytes, rounds), planned, LINE)
    yield Series(
        key="read",
        label="one thread, in order",
        kind=BANDWIDTH,
        unit="B/s",
        # A thread adds no faster than the second cache delivers, so the end of L1 is not visible.
        levels=levels[1:],
        sizes=tuple(read),
        values=tuple(1 / cost for cost in seconds_per_byte),
    )


def overheads() -> list[Figure]:
    """Return the us of a call of an empty compiled function, and of reading the timer."""
    *_, empty = kernels()

    def repeat(call: Callable[[], object]) -> None:
        for _ in range(CALLS):
            call()

    calls = (
        ("host_call", "call of a compiled function", empty),
        ("clock", "timer overhead", perf_counter_ns),
    )
    return [
        Figure(key=key, label=label, value=fastest(partial(repeat, call), 5) / CALLS / 1e3, unit="us")
        for key, label, call in calls
    ]
