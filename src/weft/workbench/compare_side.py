"""One side of a comparison: what one run, or several runs of the same thing, say of a time.

One run has the clock's own interval. Two or three have the hull of theirs, with how far they lie
apart as noise. From four on, the runs are themselves the sample: m = exp(mean log t), with
Student's 95 % interval, and more runs make it narrower.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from weft.core import Record, Timing
from weft.core.record import FAIL
from weft.workbench.statistics import drift

FEW = 20  # samples under which a bootstrap interval is too narrow to be trusted
ENOUGH = 4  # runs from which on the runs are the sample
# Student's t at 97.5 %, by degrees of freedom; beyond the last, the last: a little too wide.
STUDENT = {3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One implementation's time on one side, from one record or several runs' (us).

    ``noise`` is what the side itself shows, and ``noise_from`` by what: "drift" within a run, or
    "runs" that lie apart. ``shaky``: a run ended without the interval a median should rest on.
    """

    cold: float
    interval: Range
    spread: Range
    noise: float
    noise_from: str
    shaky: bool
    runs: int


def side(records: Sequence[Record]) -> Side | None:
    """What the timed records of one implementation say together; None where none was timed, or
    the last of them failed."""
    timings = [r.timing for r in records if r.timing and r.timing.cold > 0]
    if not timings or records[-1].verdict.status == FAIL:
        return None
    return _of_many(timings) if len(timings) >= ENOUGH else _of_few(timings)


def _of_few(timings: Sequence[Timing]) -> Side:
    colds = [t.cold for t in timings]
    middle = statistics.median(colds)
    within = max(drift(clean(t)) for t in timings)
    apart = (max(colds) - min(colds)) / middle
    return Side(
        cold=middle,
        interval=(min(t.interval[0] for t in timings), max(t.interval[1] for t in timings)),
        spread=(min(t.p10 for t in timings), max(t.p90 for t in timings)),
        noise=max(within, apart),
        noise_from="runs" if apart > within else "drift",
        shaky=any(is_shaky(t) for t in timings),
        runs=len(timings),
    )


def _of_many(timings: Sequence[Timing]) -> Side:
    # A run that ended noisy is one value among the others here: what it lacks in precision shows
    # as the runs' distance from each other, and so in the interval.
    logs = [math.log(t.cold) for t in timings]
    mean = statistics.fmean(logs)
    factor = STUDENT[min(len(logs) - 1, max(STUDENT))]
    half = factor * statistics.stdev(logs) / math.sqrt(len(logs))
    interval = (math.exp(mean - half), math.exp(mean + half))
    return Side(
        cold=math.exp(mean),
        interval=interval,
        spread=interval,
        noise=statistics.median(drift(clean(t)) for t in timings),
        noise_from="drift",
        shaky=False,
        runs=len(timings),
    )


def clean(timing: Timing) -> tuple[float, ...]:
    """The samples that were not throttled: those stand last."""
    kept = timing.samples[: len(timing.samples) - timing.throttled]
    return kept or timing.samples


def is_shaky(timing: Timing) -> bool:
    """Whether the run ended without the interval that a median's name rests on."""
    return "noisy" in timing.flags or len(clean(timing)) < FEW


def suspicions(records: Sequence[Record]) -> list[str]:
    """Why these times should not be believed, as the clock said."""
    return list(dict.fromkeys(f for r in records for f in r.flags if f.startswith("suspect")))
