"""Statistics of samples: the median with its bootstrap interval, percentiles and drift.

The interval is Efron's percentile bootstrap of the median: resample with replacement, take the median
of each resample, and cut 2.5 % off either end. The noise of a timing is one-sided, hence medians.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 1000
DECIDED = 1.02  # factor between the ends of a ratio's interval
LEAST_TIME = 1e-9  # instead of 0 in a ratio: the time of a call that does nothing


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of a set of samples; every field is in the samples' own unit."""

    median: float
    interval: tuple[float, float]
    p10: float
    p90: float
    minimum: float
    n: int

    @property
    def width(self) -> float:
        """Width of the interval as a share of the median."""
        low, high = self.interval
        return (high - low) / self.median if self.median else 0.0


def median_interval(
    samples: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95
) -> tuple[float, float]:
    """Return the bootstrap interval of the median; it depends on the samples and the seed alone.

    Raises ``ValueError`` for no samples.
    """
    # Seeded: the same samples give the same interval in the record and in a later comparison.
    medians = _resampled_medians(samples, np.random.default_rng(seed), resamples)
    return _central(medians, level)


def _resampled_medians(
    samples: Sequence[float], rng: np.random.Generator, resamples: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("no samples")
    picks = rng.integers(0, values.size, (resamples, values.size))
    medians: np.ndarray[Any, np.dtype[np.float64]] = np.median(values[picks], axis=1)
    return medians


def _central(values: np.ndarray[Any, np.dtype[np.float64]], level: float) -> tuple[float, float]:
    """Return the interval that holds the share ``level`` of the values, with equal tails."""
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(values, [tail, 100.0 - tail])
    return float(low), float(high)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratio of two medians with its 95 % interval."""

    value: float
    interval: tuple[float, float]

    @property
    def spread(self) -> float:
        """Largest factor, at least 1, by which the interval departs from a ratio of 1 in either direction."""
        low, high = self.interval
        return max(1.0 / low, high, 1.0)


def ratio_of_medians(
    numerator: Sequence[float], denominator: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Ratio:
    """Return the ratio of two medians of times, with its bootstrap interval.

    The two are resampled apart. Raises ``ValueError`` for no samples.
    """
    rng = np.random.default_rng(seed)
    above, below = (
        np.maximum(_resampled_medians(samples, rng, resamples), LEAST_TIME)
        for samples in (numerator, denominator)
    )
    value = max(float(np.median(numerator)), LEAST_TIME) / max(float(np.median(denominator)), LEAST_TIME)
    return Ratio(value=value, interval=_central(above / below, 0.95))


def summarise(samples: Sequence[float], *, seed: int = 0) -> Summary:
    """Return median, 95 % interval, p10, p90 and minimum; raises ``ValueError`` for no samples."""
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


def is_decided(
    samples: Sequence[tuple[Sequence[float], Sequence[float]]], target_width: float, spent: float
) -> bool:
    """Return True if more samples would hardly change what these say of candidates and their reference.

    Each has its samples, and the reference alone a second set. ``spent`` is the share of the time that is
    gone. Decided: at this rate no interval that is wider than ``target_width`` becomes narrower than that
    in the time left, and the ratios to candidates and of the reference to itself are known to ``DECIDED``.
    """
    references = [(first, second) for first, second in samples if second]
    if len(references) != 1 or len(samples) < 2 or not all(first for first, _ in samples):
        return False
    widths = [summarise(first).width for first, _ in samples]
    wide = [w for w in widths if w >= target_width]
    if not wide or min(wide) * math.sqrt(min(spent, 1.0)) < target_width:
        return False
    reference, repeated = references[0]
    others = [repeated, *(first for first, second in samples if not second)]
    ratios = [ratio_of_medians(reference, other).interval for other in others]
    return all(high <= DECIDED * low for low, high in ratios)


def drift(samples: Sequence[float], blocks: int = 4) -> float:
    """Return how far the medians of successive blocks lie apart, as a share of the whole median.

    It shows a clock that wanders during the run, which an interval cannot: that takes samples for
    independent. It is 0 below two samples a block.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size < 2 * blocks:
        return 0.0
    medians = [float(np.median(block)) for block in np.array_split(values, blocks)]
    whole = float(np.median(values))
    return (max(medians) - min(medians)) / whole if whole else 0.0


def is_steady(samples: Sequence[float], window: int = 5, within: float = 0.01) -> bool:
    """Return True if the medians of the last two windows agree within a share (1 %)."""
    if len(samples) < 2 * window:
        return False
    before = float(np.median(samples[-2 * window : -window]))
    now = float(np.median(samples[-window:]))
    return abs(now - before) <= within * max(before, now)
