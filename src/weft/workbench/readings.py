"""Clocks, power, heat and throttling, read beside the rounds, and what many readings come to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weft.machine.clocks import Sampler

_now = time.perf_counter_ns
APART = 5_000_000  # ns between two readings; a card renews its figures no faster


class Readings:
    """A sampler that is asked at most every 5 ms, so that reading costs a round nothing."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._at = 0
        self._latest: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """What holds now, or held up to 5 ms ago; empty on a CPU."""
        if _now() - self._at > APART:
            self._latest = self.sampler.read()
            self._at = _now()
        return self._latest


def is_throttled(reading: Mapping[str, Any]) -> bool:
    """Whether heat or a brake held the clock down. A power cap is the normal state of a large GPU
    under full load, not a fault of the moment: it is flagged and not retried."""
    held = ("thermal", "slowdown", "brake")
    return any(word in reason for reason in reading.get("throttle", ()) for word in held)


def summarise_clocks(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and range of what was read beside the rounds, and how often each throttle reason."""
    found: dict[str, Any] = {}
    for key in ("sm_mhz", "mem_mhz", "power_w", "temp_c"):
        values = [float(r[key]) for r in readings if r.get(key) is not None]
        if values:
            found[key] = [min(values), float(np.median(values)), max(values)]
    reasons = Counter(reason for r in readings for reason in r.get("throttle", ()))
    if any(readings):
        found |= {"throttle": dict(reasons), "readings": len(readings)}
    return found
