"""Measurement of a CPU's ceilings with torch on all its threads, in a few seconds.

Other load on a shared machine only makes a round slower. Each figure is therefore the best of many short
rounds' medians, and the bandwidths are measured again between the matrix products.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter, process_time
from typing import Any

from weft.core import Log
from weft.machine.device import Device

SMALLEST, LARGEST = 64 << 20, 512 << 20  # bytes of one buffer
CALLS = 5  # in a round
BUDGET = 0.4  # seconds for one matrix rate, and half as much for one visit of a bandwidth
LONGEST = 0.1  # seconds of a call: a larger product would only take time
MAX_SPREAD = 0.5  # by which the usual round may be slower than the best one, on a quiet machine
IDLE_SHARE = 0.75  # of the threads' time must be this process's, or other work disturbed it
RATES = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "fp16": "float16"}


def best_median(call: Callable[[], object], budget: float, spreads: list[float] | None = None) -> float:
    """Seconds of ``call``: the least median of rounds of ``CALLS``, in about ``budget`` seconds.

    ``spreads`` gets the distance from the best round to the usual one, as a share of the best.
    """
    # Not timed: the first call touches the pages and starts torch's threads.
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
    if spreads is not None:
        spreads.append(statistics.median(medians) / min(medians) - 1)
    return min(medians)


def buffer_bytes(cache: int | None, memory: int | None) -> int:
    """Return the size of one buffer: four times the last-level cache, at most a sixteenth of memory."""
    # Larger than the last-level cache, so that main memory is measured.
    size = max(SMALLEST, 4 * (cache or SMALLEST))
    return max(1 << 20, min(size, LARGEST, (memory or 16 * LARGEST) // 16))


def streams(torch: Any, nbytes: int) -> dict[str, list[tuple[int, Callable[[], object]]]]:
    """Return the calls to time for each bandwidth on fp32 data, with the bytes that each moves.

    A library's copy may bypass the cache on stores where a plain kernel does not, or the reverse. The
    ceiling is the better of the two.
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
    """Return the FLOP/s of an n x n by n x n product, the best over ``sizes``.

    A size is left out once a single call takes over ``LONGEST``: without the instructions for it,
    fp16 on a CPU is hundreds of times slower than fp32.
    """
    best = 0.0
    for n in sizes:
        a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
        product = partial(torch.mm, a, b, out=torch.empty(n, n, dtype=dtype))
        start = perf_counter()
        product()
        # The first size is always measured: a rate of 0 would make every efficiency meaningless.
        if best and perf_counter() - start > LONGEST:
            break
        best = max(best, 2 * n**3 / best_median(product, budget / len(sizes)))
    return best


@contextmanager
def all_threads(torch: Any, threads: int | None) -> Iterator[None]:
    """Let torch use as many threads as may run here; restore the user's choice afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(
    torch: Any,
    device: Device,
    log: Log,
    sizes: tuple[int, ...] = (256, 1024, 2048),
) -> tuple[dict[str, Any], str]:
    """``copy``, ``read``, ``fill`` in bytes/s and ``matrix`` in FLOP/s by rate; and a doubt.

    A CPU has no tf32: asked for it, torch computes in fp32, so that is its rate here. The doubt is
    empty unless other work had the CPU for much of the time, or repeats differ widely: every figure is then
    too low.
    """
    nbytes = buffer_bytes(device.l2_bytes, device.memory_bytes)
    bandwidths: dict[str, Any] = {"copy": 0.0, "read": 0.0, "fill": 0.0}
    matrix: dict[str, float] = {}
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        all_threads(torch, device.threads),
    ):
        torch.manual_seed(0)
        log(f"copy, read and fill of {nbytes >> 20} MiB on {torch.get_num_threads()} threads")
        timed = streams(torch, nbytes)
        spreads: list[float] = []
        start, ours = perf_counter(), process_time()
        for rate, name in RATES.items():
            # Between the products: another program's burst then disturbs a few rounds, not all of one figure.
            for word, calls in timed.items():
                seconds = [(moved, best_median(call, BUDGET / 2, spreads)) for moved, call in calls]
                bandwidths[word] = max(bandwidths[word], *(moved / s for moved, s in seconds))
            log(f"matrix products in {rate}")
            matrix[rate] = matrix_rate(torch, getattr(torch, name), sizes, BUDGET)
        share = (process_time() - ours) / (perf_counter() - start) / torch.get_num_threads()
    doubt = ""
    if share < IDLE_SHARE:
        doubt = f"other work left this process {share:.0%} of the CPU: the ceilings are too low"
    elif statistics.median(spreads) > MAX_SPREAD:
        doubt = (
            f"repeats of one figure differ by {statistics.median(spreads):.0%}: the ceilings may be too low"
        )
    return {**bandwidths, "matrix": {**matrix, "tf32": matrix["fp32"]}}, doubt
