"""Grade the cold time that a benchmark reports, for honest kernels and for one that remembers addresses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require
from weft.learn.probes.fake_device import FakeDevice, FakeKernel
from weft.learn.probes.returned import function_returning

WRONG = "remembers the address"
LUCKY = "still in the L2 cache"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    time_cold = function_returning("a number", candidate, "time_cold")
    for remembers in (False, True):
        for nbytes in (1 << 22, 1 << 20, int(generator.integers(20_000, 60_000))):
            device = FakeDevice(l2_bytes=50 << 20)
            repeats, duration = int(generator.integers(80, 120)), float(generator.uniform(60, 600))
            kernel = FakeKernel(device, duration, remembers=remembers)
            time = time_cold(device, kernel, nbytes, repeats)
            name = "a kernel that remembers addresses" if remembers else "a kernel"
            case = f"{name}, {nbytes / 1e6:.3g} MB, {repeats} repeats"
            reason = f"expected {duration:.1f} us, got {time:.1f}. {_mistake(time, duration, remembers)}"
            yield require(abs(time - duration) < 0.02 * duration, case, reason)
            reason = f"{repeats} repeats need {repeats} launches, and there were {device.launches}"
            yield require(device.launches >= repeats, f"{case}, launches", reason)


def _mistake(time: float, duration: float, remembers: bool) -> str:
    if time > duration:
        return "Compilation or allocation is in the time"
    if not remembers:
        return "Buffers are still in the L2 cache"
    return "The kernel remembers the address of a buffer: each call needs one that it has not seen"
