"""Measurement of a GPU's ceilings with torch and CUDA events, in a few seconds.

Each figure is the best over a few sizes of the median of ``CALLS`` calls, timed once rounds no
longer improve. The queue is kept full: every round is launched as a whole, some calls ahead of the
first event, so that no event ever waits for the host. Data are normal, not zeros, which draw less
power and run faster than any kernel will. On the fastest card a call still runs for a fifth of a
millisecond, against which an event's own microsecond is noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

from weft.core import Log

Readers = Sequence[Callable[[Any], object]]
CALLS = 20
AHEAD = 4
ROUNDS = 6
LONGEST = 0.1  # seconds of a call: a larger product would only take time
STEADY = 0.002  # a round that gains less than this share ends the rounds
BUFFERS = (1 << 30, 2 << 30, 4 << 30)  # bytes; a buffer may take an eighth of the free memory
FP8 = "fp8"
# Rate -> torch dtype, edges of the square products. fp64's is smaller: its 8192 adds no rate.
PRODUCTS = {
    "bf16": ("bfloat16", (4096, 8192)),
    "fp16": ("float16", (4096, 8192)),
    "tf32": ("float32", (4096, 8192)),
    "fp32": ("float32", (4096, 8192)),
    "fp64": ("float64", (2048, 4096)),
    FP8: ("float8_e4m3fn", (4096, 8192)),
}


def best_median(torch: Any, call: Callable[[], object], calls: int = CALLS, rest: float = 0.0) -> float:
    """Return the seconds of ``call`` on the current stream: the lowest median of rounds, once steady.

    ``rest`` seconds of idling precede each round, for calls that reach the power limit.
    """
    best = float("inf")
    for _ in range(ROUNDS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        time.sleep(rest)
        # These calls fill the queue: the first event is recorded while the device is still busy with them.
        for _ in range(min(AHEAD, calls // 2)):
            call()
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
        median = statistics.median(a.elapsed_time(b) for a, b in pairwise(events)) / 1e3
        # Rounds go on while they improve: clocks rise from idle, and the allocator's first calls are slow.
        steady = median > best * (1 - STEADY)
        best = min(best, median)
        if steady:
            break
    return best


@contextmanager
def product_precision(torch: Any, precision: str) -> Iterator[None]:
    """Compute fp32 products as ``"ieee"`` or ``"tf32"`` inside; restore the user's choice afterwards."""
    # fp32_precision is global state of torch: the caller's setting is restored.
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = precision
    try:
        yield
    finally:
        switch.fp32_precision = before


def fitting(free: int) -> tuple[int, ...]:
    """Return the buffer sizes that fit, or one of an eighth of the free memory."""
    return tuple(b for b in BUFFERS if b <= free // 8) or (max(1 << 20, free // 8 // 512 * 512),)


def bandwidths(torch: Any, nbytes: int, readers: Readers = ()) -> dict[str, float]:
    """Return bytes per second of a copy (read + written), a read and a fill of fp32 data.

    The read is by torch's sum or a faster one of ``readers``.
    """
    source = torch.randn(nbytes // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    size = source.numel() * 4
    # The driver's copy and an elementwise kernel are not equally fast on every card.
    copies = (
        lambda: target.copy_(source),
        lambda: torch.neg(source, out=target),
    )
    return {
        "copy": 2 * size / min(best_median(torch, c) for c in copies),
        "read": size / min(best_median(torch, partial(r, source)) for r in (torch.sum, *readers)),
        "fill": size / best_median(torch, lambda: target.fill_(1.5)),
    }


def matrix_rate(torch: Any, rate: str) -> float:
    """Return the FLOP/s of a square product at this rate, the best over its sizes.

    A size is left out when the one before says that a call would take over ``LONGEST``: a card
    that is slow in fp64 reaches its rate at the smaller size as well.
    """
    name, sizes = PRODUCTS[rate]
    dtype = getattr(torch, name)
    best = 0.0
    with product_precision(torch, "tf32" if rate == "tf32" else "ieee"):
        # Ascending: a slow rate is known after the smaller product, and the larger one is left out.
        for n in sizes:
            if best and 2 * n**3 / best > LONGEST:
                break
            # Normal values: zeros draw less power and would run at higher clocks.
            a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
            if rate == FP8:
                call = _fp8_product(torch, a, b)
            else:
                call = partial(torch.mm, a, b, out=torch.empty(n, n, dtype=dtype, device="cuda"))
            # A large product is held back by the power limit after some milliseconds: what the card
            # reaches at best is reached in short rounds.
            seconds = best_median(torch, call, calls=4, rest=0.02)
            best = max(best, 2 * n**3 / seconds)
    return best


def _fp8_product(torch: Any, a: Any, b: Any) -> Callable[[], object]:
    """Return a call of the library's fastest fp8 product, whose sums have the tensor cores' precision."""
    one = torch.ones((), device="cuda")
    c = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device="cuda")
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True, "out": c}
    return partial(torch._scaled_mm, a, b.t(), one, one, **options)


def measure(torch: Any, log: Log, readers: Readers = ()) -> dict[str, Any]:
    """``copy``, ``read``, ``fill`` in bytes/s and ``matrix`` in FLOP/s by rate, on device 0.

    A rate is left out where the card has no such arithmetic: tf32 and bf16 before compute
    capability 8.0, where torch would answer with another, slower one, and fp8 before 8.9.
    """
    # The user's random state is unchanged by a measurement.
    with torch.random.fork_rng(devices=[0]), torch.cuda.device(0), torch.no_grad():
        torch.manual_seed(0)
        free, _ = torch.cuda.mem_get_info()
        rates: dict[str, Any] = {"copy": 0.0, "read": 0.0, "fill": 0.0}
        for nbytes in fitting(free):
            log(f"copy, read and fill of {nbytes / (1 << 30):.2g} GiB")
            for word, reached in bandwidths(torch, nbytes, readers).items():
                rates[word] = max(rates[word], reached)
        first_with = {"bf16": (8, 0), "tf32": (8, 0), FP8: (8, 9)}
        matrix = {}
        for rate in PRODUCTS:
            if torch.cuda.get_device_capability(0) >= first_with.get(rate, (0, 0)):
                log(f"matrix products in {rate}")
                matrix[rate] = matrix_rate(torch, rate)
        # Up to 4 GiB of buffers go back to the driver before the benchmark allocates its own.
        torch.cuda.empty_cache()
    return {**rates, "matrix": matrix}
