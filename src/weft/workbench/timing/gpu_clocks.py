"""Clocks, power, temperature and throttling of a GPU, read beside the samples and summarised."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weft.machine.clocks import Sampler

_now = time.perf_counter_ns
READ_INTERVAL_NS = 5_000_000  # a card updates its figures no faster


class Readings:
    """Sampler that is read at most every 5 ms, so that reading costs a round nothing."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._read_at = 0
        self._latest: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return the current reading, at most 5 ms old; empty on a CPU."""
        if _now() - self._read_at > READ_INTERVAL_NS:
            self._latest = self.sampler.read()
            self._read_at = _now()
        return self._latest


def is_throttled(reading: Mapping[str, Any]) -> bool:
    """Return True if heat or a hardware brake held the clock down.

    A power cap is the normal state of a large GPU under full load: it is flagged and not retried.
    """
    causes = ("thermal", "slowdown", "brake")
    return any(cause in reason for reason in reading.get("throttle", ()) for cause in causes)


def summarise_clocks(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return [least, median, largest] of each figure, and the count of each throttle reason."""
    summary: dict[str, Any] = {}
    for key in ("sm_mhz", "mem_mhz", "power_w", "temp_c"):
        values = [float(r[key]) for r in readings if r.get(key) is not None]
        if values:
            summary[key] = [min(values), float(np.median(values)), max(values)]
    reasons = Counter(reason for r in readings for reason in r.get("throttle", ()))
    if any(readings):
        summary |= {"throttle": dict(reasons), "readings": len(readings)}
    return summary
