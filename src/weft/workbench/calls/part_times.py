"""Seconds and number of the parts of a step: requests to a worker, answers in float64, phases of a timing.

A part inside another counts for itself alone, so that the parts of a step add up to no more than the step.
Nothing is recorded, at the cost of one look-up, unless :func:`recording` is active in this thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class PartTimes:
    """Seconds and number of calls by the name of a part; ``inner`` has the seconds of the parts inside the
    open ones."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    inner: list[float] = field(default_factory=list)


_times: ContextVar[PartTimes | None] = ContextVar("part_times", default=None)


@contextmanager
def recording(times: PartTimes) -> Iterator[None]:
    """Add what :func:`part` measures in this thread to ``times``, and no longer to what was active before."""
    token = _times.set(times)
    try:
        yield
    finally:
        _times.reset(token)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Add the seconds of the block, without those of parts inside it, to the part ``name``."""
    times = _times.get()
    if times is None:
        yield
        return
    times.inner.append(0.0)
    began = time.perf_counter()
    try:
        yield
    finally:
        elapsed = time.perf_counter() - began
        own = elapsed - times.inner.pop()
        if times.inner:
            times.inner[-1] += elapsed
        times.seconds[name] = times.seconds.get(name, 0.0) + own
        times.calls[name] = times.calls.get(name, 0) + 1
