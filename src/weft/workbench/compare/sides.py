"""The two sides of a comparison: A holds the baseline's records, B the candidate's.

Records are divided by file or by commit. The times of one implementation on one side become a
:class:`SideTime`. One run has the interval that the timing reports. Two or three runs have the smallest
interval that covers all of theirs, and their distance counts as noise. From four runs on the runs are the
sample: the time is exp(mean log t) with Student's 95 % interval, so more runs give a narrower interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.core import Record, Timing, WeftError
from weft.core.record import FAIL
from weft.workbench.timing.stats import drift

DIRTY = "-dirty"
SHORT_COMMIT = 12  # characters of a commit in tables and messages
MIN_SAMPLES = 20  # a bootstrap interval of fewer samples is too narrow to rely on
MIN_POOLED_RUNS = 4  # with fewer runs Student's interval is too wide to be of use
# Student's t at 97.5 % by degrees of freedom. More degrees use the last entry, which is slightly too wide.
STUDENT_T = {3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Commit among records: dates of its first and last record, and their number.

    ``commit`` ends in ``-dirty`` if the working tree had uncommitted changes.
    """

    commit: str
    first: str
    last: str
    records: int

    @property
    def short(self) -> str:
        """First digits of the commit, with ``-dirty`` if the working tree had changes."""
        dirty = DIRTY if self.commit.endswith(DIRTY) else ""
        return self.commit.removesuffix(DIRTY)[:SHORT_COMMIT] + dirty

    def to_json(self) -> dict[str, Any]:
        """Return the commit as plain data."""
        return asdict(self)


def commit_of(record: Record) -> str:
    """Return the commit of a record, with ``-dirty`` where it applies; ``unknown`` if it has none."""
    commit = str(record.machine.get("commit") or "unknown")
    return commit + (DIRTY if record.machine.get("dirty") else "")


def commits(records: Sequence[Record]) -> list[Commit]:
    """Return the commits of records, the earliest measured first."""
    dates: dict[str, list[str]] = {}
    for r in records:
        dates.setdefault(commit_of(r), []).append(str(r.machine.get("date") or ""))
    summaries = [Commit(commit=name, first=min(d), last=max(d), records=len(d)) for name, d in dates.items()]
    return sorted(summaries, key=lambda c: (c.first, c.last))


def select_commit(records: Sequence[Record], prefix: str) -> list[Record]:
    """Return the records of the commit that begins with ``prefix``; a clean tree's before a dirty one's.

    Raises :class:`WeftError` if no commit or several commits match.
    """
    digits = prefix.removesuffix(DIRTY)
    known = commits(records)
    matches = [c.commit for c in known if digits and c.commit.removesuffix(DIRTY).startswith(digits)]
    dirty = [c for c in matches if c.endswith(DIRTY)]
    clean = [] if prefix.endswith(DIRTY) else [c for c in matches if not c.endswith(DIRTY)]
    # A clean and a dirty tree of one commit are two candidates; without the suffix the clean one is meant.
    selected = clean or dirty
    if len(selected) != 1:
        raise WeftError(
            "several commits begin like this" if selected else "no records of this commit",
            expected=f"one of {_list_commits(known)}",
            got=prefix or "an empty name",
        )
    return [r for r in records if commit_of(r) == selected[0]]


def _list_commits(known: Sequence[Commit]) -> str:
    return ", ".join(f"{c.short} ({c.first[:10]})" if c.first else c.short for c in known)


def split_records(
    files: Sequence[Sequence[Record]], prefixes: tuple[str, str] | None
) -> tuple[list[Record], list[Record]]:
    """Return the records of baseline and candidate.

    With ``prefixes`` these are the records of two commits in all files. Otherwise one file must hold
    exactly two commits, the earlier of which is the baseline; of two files the first is the baseline.

    Raises :class:`WeftError` if the two sides are not determined.
    """
    pooled = [r for records in files for r in records]
    if prefixes is not None:
        baseline, candidate = select_commit(pooled, prefixes[0]), select_commit(pooled, prefixes[1])
        if commit_of(baseline[0]) == commit_of(candidate[0]):
            raise WeftError(
                "a commit cannot be compared with itself",
                expected="two commits",
                got=" and ".join(prefixes),
                hint="for two runs of one commit, write them to two files",
            )
        return baseline, candidate
    if len(files) == 1:
        known = commits(pooled)
        if len(known) != 2:
            raise WeftError(
                "one file does not determine the two sides",
                expected="records of two commits in it",
                got=f"{len(known)}: {_list_commits(known)}",
                hint="name two: --commits OLD NEW, or give a second file",
            )
        return select_commit(pooled, known[0].commit), select_commit(pooled, known[1].commit)
    if len(files) != 2:
        raise WeftError(
            "cannot tell which file is before and which is after",
            expected="one file or two, or --commits OLD NEW",
            got=f"{len(files)} files",
        )
    return list(files[0]), list(files[1])


def differences(baseline: Sequence[Record], candidate: Sequence[Record]) -> list[str]:
    """Return what else differs between two sides of like machines: driver, power limit, versions."""

    def settings(records: Sequence[Record]) -> Mapping[str, Any]:
        machine = records[-1].machine
        versions = {f"{k} version": v for k, v in (machine.get("versions") or {}).items()}
        return {"driver": machine.get("driver"), "power limit": machine.get("power_limit_w"), **versions}

    before, after = settings(baseline), settings(candidate)
    # A setting that one side did not record is unknown, which is not a difference.
    changed = [k for k in before if k in after and before[k] != after[k]]
    return [f"{k}: {before[k]} in A, {after[k]} in B" for k in changed]


@dataclass(frozen=True, kw_only=True)
class SideTime:
    """Time of one implementation on one side (us), from one or several runs.

    ``spread`` is p10 to p90 of the samples. ``noise`` is the noise that the runs themselves show, and
    ``noise_from`` its source: "drift" within a run, or the distance between "runs". ``noisy`` is True if
    a run ended before its interval was narrow enough.
    """

    cold: float
    interval: Range
    spread: Range
    noise: float
    noise_from: str
    noisy: bool
    runs: int


def side_time(records: Sequence[Record]) -> SideTime | None:
    """Return the time of one implementation's records; None if none is timed or the last one failed."""
    timings = [r.timing for r in records if r.timing and r.timing.cold > 0]
    # The last record is the current state: older times do not count for code that fails now.
    if not timings or records[-1].verdict.status == FAIL:
        return None
    return _from_sample_of_runs(timings) if len(timings) >= MIN_POOLED_RUNS else _from_few_runs(timings)


def _from_few_runs(timings: Sequence[Timing]) -> SideTime:
    colds = [t.cold for t in timings]
    median = statistics.median(colds)
    # Two or three runs are too few for an interval of their own, so their distance is noise instead.
    within_run = max(drift(unthrottled_samples(t)) for t in timings)
    between_runs = (max(colds) - min(colds)) / median
    return SideTime(
        cold=median,
        interval=(min(t.interval[0] for t in timings), max(t.interval[1] for t in timings)),
        spread=(min(t.p10 for t in timings), max(t.p90 for t in timings)),
        noise=max(within_run, between_runs),
        noise_from="runs" if between_runs > within_run else "drift",
        noisy=any(_is_noisy(t) for t in timings),
        runs=len(timings),
    )


def _from_sample_of_runs(timings: Sequence[Timing]) -> SideTime:
    # The mean of logarithms makes the result symmetric: swapping A and B inverts the ratio exactly.
    logs = [math.log(t.cold) for t in timings]
    mean = statistics.fmean(logs)
    t = STUDENT_T[min(len(logs) - 1, max(STUDENT_T))]
    half_width = t * statistics.stdev(logs) / math.sqrt(len(logs))
    interval = (math.exp(mean - half_width), math.exp(mean + half_width))
    return SideTime(
        cold=math.exp(mean),
        interval=interval,
        spread=interval,
        noise=statistics.median(drift(unthrottled_samples(t)) for t in timings),
        noise_from="drift",
        # A run that ended noisy is one value of the sample. Its lack of precision shows as the distance
        # between the runs, and so in the interval.
        noisy=False,
        runs=len(timings),
    )


def unthrottled_samples(timing: Timing) -> tuple[float, ...]:
    """Return the samples that were not throttled, which come first; all samples if every one was."""
    return timing.samples[: len(timing.samples) - timing.throttled] or timing.samples


def _is_noisy(timing: Timing) -> bool:
    return "noisy" in timing.flags or len(unthrottled_samples(timing)) < MIN_SAMPLES
