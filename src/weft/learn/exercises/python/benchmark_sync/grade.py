"""Grade the time that a benchmark reports for fake kernels, on an idle and on a busy device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require
from weft.learn.probes.fake_device import COMPILE, FakeDevice, FakeKernel
from weft.learn.probes.returned import function_returning

WRONG = "compiled in its first call"
LUCKY = "queued before the clock"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    time_kernel = function_returning("a number", candidate, "time_kernel")
    for busy in (0.0, float(generator.uniform(200_000, 400_000))):
        for duration in (*generator.uniform(20, 400, size=2), 2000.0):
            repeats = int(generator.integers(60, 200))
            device = FakeDevice(l2_bytes=0)
            buffer = device.allocate(1 << 20)
            kernel = FakeKernel(device, duration)
            device.synchronize()
            if busy:
                device.queue(busy)
            time = time_kernel(device, kernel, buffer, repeats)
            state = "a busy" if busy else "an idle"
            case = f"a kernel of {duration:.0f} us, {repeats} repeats, {state} device"
            reason = f"expected {duration:.1f} us, got {time:.1f}. {_mistake(time, duration, repeats, busy)}"
            yield require(abs(time - duration) < 0.02 * duration, case, reason)
            reason = f"expected {repeats} launches and a warm-up, and there were {device.launches}"
            yield require(device.launches > repeats, f"{case}, launches", reason)


def _mistake(time: float, duration: float, repeats: int, busy: float) -> str:
    excess = (time - duration) * repeats
    if abs(time - 5 - COMPILE / repeats) < 1:
        return "That is the time of the launches, and of the compilation: wait for the device, and warm up"
    if abs(time - 5) < 1:
        return "That is the time to launch: wait for the device before the clock is read"
    if busy and excess > 0.5 * busy:
        return "Work that was queued before the clock started is in the time"
    if excess > 0.9 * COMPILE:
        return "A kernel is compiled in its first call: warm up before the clock starts"
    return ""
