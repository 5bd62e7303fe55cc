"""Statistics of samples: the median with its bootstrap interval, percentiles, and drift.

The interval is Efron's percentile bootstrap of the median: resample with replacement, take the
median of each, and cut 2.5 % off either end. Medians, since a timing's noise is one-sided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a set of samples says; every field is in the samples' own unit."""

    median: float
    interval: tuple[float, float]
    p10: float
    p90: float
    minimum: float
    n: int

    @property
    def width(self) -> float:
        """The interval's width as a share of the median."""
        low, high = self.interval
        return (high - low) / self.median if self.median else 0.0


def median_interval(
    samples: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95
) -> tuple[float, float]:
    """The bootstrap interval of the median; the same samples and seed give the same interval.

    Raises ``ValueError`` for no samples.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("no samples")
    picks = np.random.default_rng(seed).integers(0, values.size, (resamples, values.size))
    medians = np.median(values[picks], axis=1)
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(medians, [tail, 100.0 - tail])
    return float(low), float(high)


def summarise(samples: Sequence[float], *, seed: int = 0) -> Summary:
    """Median, its 95 % interval, p10, p90 and minimum; raises ``ValueError`` for no samples."""
    interval = median_interval(samples, seed=seed)
    p10, median, p90 = np.percentile(np.asarray(samples, dtype=np.float64), [10, 50, 90])
    return Summary(
        median=float(median),
        interval=interval,
        p10=float(p10),
        p90=float(p90),
        minimum=float(min(samples)),
        n=len(samples),
    )


def drift(samples: Sequence[float], blocks: int = 4) -> float:
    """How far the medians of successive blocks lie apart, as a share of the whole median.

    What an interval cannot see, since it takes samples for independent: a clock that wanders
    within the run. Under two samples a block it is 0.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size < 2 * blocks:
        return 0.0
    medians = [float(np.median(part)) for part in np.array_split(values, blocks)]
    whole = float(np.median(values))
    return (max(medians) - min(medians)) / whole if whole else 0.0


def is_steady(samples: Sequence[float], window: int = 5, within: float = 0.01) -> bool:
    """Whether the medians of the last two windows agree within a share (1 %)."""
    if len(samples) < 2 * window:
        return False
    before = float(np.median(samples[-2 * window : -window]))
    now = float(np.median(samples[-window:]))
    return abs(now - before) <= within * max(before, now)
