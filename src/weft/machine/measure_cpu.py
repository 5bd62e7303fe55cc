"""Measure a CPU's ceilings with torch on all its threads, in a few seconds.

A neighbour on a shared machine only ever makes a round slower, so each figure is the best of many
short rounds' medians, and the bandwidths are visited again between one matrix product and the next.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter, process_time
from typing import Any

from weft.machine.query import Device

SMALLEST, LARGEST = 64 << 20, 512 << 20  # bytes of one buffer
CALLS = 5  # in a round
BUDGET = 0.4  # seconds for one matrix rate, and half as much for one visit of a bandwidth
LONGEST = 0.1  # seconds of a call: a larger product would only take time
QUIET = 0.75  # of the threads' time must be ours, or other work was in the way
RATES = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "fp16": "float16"}


def best_median(call: Callable[[], object], budget: float) -> float:
    """Seconds of ``call``: the least median of rounds of ``CALLS``, in about ``budget`` seconds."""
    call()
    end = perf_counter() + budget
    medians: list[float] = []
    while not medians or perf_counter() < end:
        samples = []
        for _ in range(CALLS):
            start = perf_counter()
            call()
            samples.append(perf_counter() - start)
        medians.append(statistics.median(samples))
    return min(medians)


def buffer_bytes(cache: int | None, memory: int | None) -> int:
    """One buffer's size: four times the last-level cache, and at most a sixteenth of memory."""
    size = max(SMALLEST, 4 * (cache or SMALLEST))
    return max(1 << 20, min(size, LARGEST, (memory or 16 * LARGEST) // 16))


def streams(torch: Any, nbytes: int) -> dict[str, list[tuple[int, Callable[[], object]]]]:
    """What to time for each bandwidth: the bytes a call moves, and the call, on fp32 data.

    A library's copy may store past the cache where a plain kernel does not, or the other way
    round; the ceiling is the better of the two.
    """
    source = torch.randn(nbytes // 4, dtype=torch.float32)
    target = torch.empty_like(source)
    size = source.numel() * 4
    return {
        "copy": [
            (2 * size, lambda: target.copy_(source)),
            (2 * size, lambda: torch.neg(source, out=target)),
        ],
        "read": [(size, lambda: torch.sum(source))],
        "fill": [(size, lambda: target.fill_(1.5))],
    }


def matrix_rate(torch: Any, dtype: Any, sizes: tuple[int, ...], budget: float) -> float:
    """FLOP/s of an n x n by n x n product, the best over ``sizes``.

    A size is left out once a single call takes over ``LONGEST``: without the instructions for it,
    fp16 on a CPU is hundreds of times slower than fp32.
    """
    best = 0.0
    for n in sizes:
        a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
        product = partial(torch.mm, a, b, out=torch.empty(n, n, dtype=dtype))
        start = perf_counter()
        product()
        if best and perf_counter() - start > LONGEST:
            break
        best = max(best, 2 * n**3 / best_median(product, budget / len(sizes)))
    return best


@contextmanager
def all_threads(torch: Any, threads: int | None) -> Iterator[None]:
    """Torch on as many threads as may run here, whatever the user had chosen before and after."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(
    torch: Any,
    device: Device,
    say: Callable[[str], None],
    sizes: tuple[int, ...] = (256, 1024, 2048),
) -> tuple[dict[str, Any], str]:
    """``copy``, ``read``, ``fill`` in bytes/s and ``matrix`` in FLOP/s by rate; and a doubt.

    A CPU has no tf32: asked for it, torch computes in fp32, so that is its rate here. The doubt is
    empty unless other work had the CPU for much of the time: every figure is then too low.
    """
    nbytes = buffer_bytes(device.l2_bytes, device.memory_bytes)
    found: dict[str, Any] = {"copy": 0.0, "read": 0.0, "fill": 0.0}
    matrix: dict[str, float] = {}
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        all_threads(torch, device.threads),
    ):
        torch.manual_seed(0)
        say(f"copy, read and fill of {nbytes >> 20} MiB on {torch.get_num_threads()} threads")
        timed = streams(torch, nbytes)
        start, ours = perf_counter(), process_time()
        for rate, name in RATES.items():
            for word, calls in timed.items():
                seconds = [(moved, best_median(call, BUDGET / 2)) for moved, call in calls]
                found[word] = max(found[word], *(moved / s for moved, s in seconds))
            say(f"matrix products in {rate}")
            matrix[rate] = matrix_rate(torch, getattr(torch, name), sizes, BUDGET)
        share = (process_time() - ours) / (perf_counter() - start) / torch.get_num_threads()
    doubt = ""
    if share < QUIET:
        doubt = f"other work left our threads {share:.0%} of the CPU: the ceilings are too low"
    return {**found, "matrix": {**matrix, "tf32": matrix["fp32"]}}, doubt
