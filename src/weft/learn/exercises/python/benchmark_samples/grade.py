"""Grade the summary of odd and even numbers of samples, and the time of a fake kernel with jitter."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require
from weft.learn.probes.fake_device import FakeDevice, FakeKernel
from weft.learn.probes.returned import function_returning

WRONG = "the mean follows"
LUCKY = "even number"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    summary = candidate.function("summary")
    time_robust = function_returning("a number", candidate, "time_robust")
    for n in (1, 2, 3, 8, 9, int(generator.integers(20, 100)), int(generator.integers(20, 100)) * 2):
        samples = [float(s) for s in generator.gamma(2.0, 50.0, size=n)]
        samples[-1] *= 20
        copy, ordered = list(samples), sorted(samples)
        case = f"summary of {n} samples"
        result = summary(copy)
        require(copy == samples, case, "the list of samples was changed: sorted(samples) makes a new one")
        triple = isinstance(result, tuple) and len(result) == 3
        require(triple, case, f"expected three numbers, got {result!r}")
        median, low, high = result
        expected = float(np.median(samples))
        reason = f"expected the median {expected:.3f}, got {median:.3f}. {_mistake(median, ordered)}"
        require(abs(median - expected) < 1e-6, case, reason)
        for name, value, position in (("low", low, n // 4), ("high", high, n - 1 - n // 4)):
            reason = f"{name}: expected {ordered[position]:.3f}, the sample at position {position}"
            reason += f", got {value:.3f}"
            require(value == ordered[position], case, reason)
        yield case
    for n in (60, 101):
        duration, device = float(generator.uniform(200, 800)), FakeDevice(l2_bytes=0)
        kernel = FakeKernel(device, duration, noise=_noise)
        time = time_robust(device, kernel, device.allocate(1 << 20), n)
        # The first call is the warm-up. A sample includes one launch and one synchronisation: 15 us.
        expected = 15 + duration * float(np.median(list(islice(_noise(), 1, n + 1))))
        reason = f"expected {expected:.1f} us within 1 %, got {time:.1f}"
        yield require(abs(time - expected) < 0.01 * duration, f"{n} calls with jitter", reason)


def _noise() -> Iterator[float]:
    """Yield factors: a fast start, then jitter of 5 %, with an interruption in each ninth call."""
    for call in count():
        jitter = 0.1 * (call * 0.618 % 1) - 0.05  # spread evenly, in no visible order
        yield 6.0 if call % 9 == 8 else 0.85 if call < 12 else 1 + jitter


def _mistake(median: float, ordered: list[float]) -> str:
    if abs(median - sum(ordered) / len(ordered)) < 1e-6:
        return "That is the mean, and the mean follows a single large sample"
    if len(ordered) % 2 == 0 and median in ordered:
        return "For an even number of samples, take the mean of the two in the middle"
    return ""
