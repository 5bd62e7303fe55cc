"""Result of judging a candidate in another suite's format: the machine-readable contract."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from weft.core import FORWARD, Finding, Record, Timing, Verdict
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench.calls.part_times import PartTimes, recording
from weft.workbench.judge.memory import Shortage
from weft.workbench.records import doubts, is_suspect_by_load, suspect_flags
from weft.workbench.timing.stats import Ratio, ratio_of_medians

NOT_RUN = "not run"
# Factor by which the reference may differ from itself, and a speed-up from either end of a narrow interval,
# where no difference is shown: above it the machine was too busy to say that there is none.
MAX_SPREAD = 1.1
LEAST_US = 1e-3  # of a call: a shorter time is below every clock
# Checks in the order that a reader expects: the file, the output's form, then the values.
ORDER = ("import", "returns", "type", "shape", "dtype", "device", "layout", "alias", "inputs")


@dataclass(frozen=True, kw_only=True)
class OwnCheck:
    """Result of the file's own check; ``passed`` is None if it could not be applied."""

    passed: bool | None
    detail: str
    rule: str


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """Speed-up with its interval, and the reference against itself: two sets of its samples.

    The interval is the 95 % interval of the ratio of medians, widened to the ratio of the least times: other
    work on the machine makes a median longer, and hardly the least time. The ratio of the two sets is 1
    where nothing disturbs; ``spread`` is the largest factor in their interval. It widens the interval of
    the speed-up, since such a factor may be the machine's.
    """

    ratio: float
    interval: tuple[float, float]
    against_itself: Ratio

    @property
    def is_shown(self) -> bool:
        """True if the candidate and the reference differ by more than the reference from itself."""
        low, high = self.interval
        spread = (
            self.against_itself.spread if self._is_narrow else max(self.against_itself.spread, MAX_SPREAD)
        )
        return low / spread > 1 or high * spread < 1

    @property
    def is_known(self) -> bool:
        """True if the speed-up is worth telling: a difference is shown, or the machine was quiet."""
        return self.is_shown or (self.against_itself.spread <= MAX_SPREAD and self._is_narrow)

    @property
    def _is_narrow(self) -> bool:
        low, high = self.interval
        # Squared: a factor of MAX_SPREAD to either side of the middle.
        return high <= low * MAX_SPREAD**2


@dataclass(frozen=True, kw_only=True)
class Time:
    """Median times (us) of the candidate and of the reference at one case, and the speed-up."""

    case: str
    time_us: float
    baseline_us: float
    comparison: SpeedUp

    @property
    def speedup(self) -> float:
        return self.comparison.ratio

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "time_us": self.time_us,
            "baseline_us": self.baseline_us,
            **_speedup_json(self.comparison),
        }


@dataclass(kw_only=True)
class Judgement:
    """Judgement of a candidate. ``reason`` is one line, empty if the candidate is correct.

    ``gradients`` name the gradients that were compared, in the backward direction.
    """

    format: str
    operator: str
    direction: str = FORWARD
    backend: str = ""
    correct: bool = False
    reason: str = ""
    checks: list[Finding] = field(default_factory=list)
    own: OwnCheck | None = None
    times: list[Time] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    problem_bytes: int = 0  # inputs, outputs and weights
    shortage: Shortage | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    parts: dict[str, PartTimes] = field(default_factory=dict)  # of each step

    def name_gradients(self, compared: Sequence[str], left_out: Sequence[str]) -> None:
        """Name the gradients that are compared, and flag those that are not."""
        self.gradients = [name.removeprefix("gradient of ") for name in compared]
        if left_out:
            self.flags.append(
                f"gradients not compared: {', '.join(left_out)} (the candidate has no parameter of this "
                "name, or alone of this shape)"
            )

    def refuse(self, check: str, why: str, status: str = FAIL) -> None:
        """Refuse the candidate; the first refusal is its ``reason``."""
        # A pass of the same check at an earlier case must not stand beside its failure.
        self.checks = [c for c in self.checks if c.check != check]
        self.checks.append(Finding(check=check, status=status, detail=why))
        self.correct = False
        if not self.reason:
            self.reason = f"{check}: {why}" if status == FAIL else f"{NOT_RUN}: {why}"

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time of a step to ``seconds``, and the times of its parts to ``parts``."""
        began = time.monotonic()
        try:
            with recording(self.parts.setdefault(name, PartTimes())):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def run_out_of_memory(self, shortage: Shortage) -> None:
        """Record that memory ran out: the candidate is not judged, whatever was seen of it before."""
        self.shortage, self.correct = shortage, False
        self.checks = [c for c in self.checks if c.status == PASS]
        self.checks.append(Finding(check="memory", status=NOT_RUN, detail=shortage.reason))
        self.reason = f"{NOT_RUN}: {shortage.reason}"

    def stop(self) -> None:
        """Record that the user stopped the judgement: the candidate is not judged."""
        self.correct = False
        self.reason = self.reason or f"{NOT_RUN}: stopped"
        self.sort_checks()

    def add_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Add the check's verdicts: the candidate is correct only if every case passed."""
        self.checks += merge_findings(verdicts)
        failed = next((v for v in verdicts if v.status == FAIL), None)
        unsupported = next((v for v in verdicts if v.status == UNSUPPORTED), None)
        if failed is not None:
            name_case = len(verdicts) > 1 and failed.case not in failed.reason
            self.reason = f"{failed.reason}{f' at {failed.case}' if name_case else ''}"
        elif unsupported is not None:
            self.refuse("case", f"{unsupported.reason} ({unsupported.case})", NOT_RUN)
        else:
            self.correct = bool(verdicts)

    def add_records(self, records: Sequence[Record], candidate: str) -> None:
        """Add the records of a timed case; a failed or suspect timing refuses the candidate.

        On a busy machine a suspicion by time alone costs the speed-up of the case and refuses nothing.
        """
        timed = next(r for r in records if r.implementation == candidate)
        baseline = next(r for r in records if r.implementation != candidate)
        self.flags += [f for f in timed.flags if f not in self.flags]
        self.kernels += [k for k in timed.kernels if k not in self.kernels]
        if timed.verdict.status == FAIL:
            self.refuse("timed", f"{timed.verdict.reason} at {timed.case}")
            return
        suspicions = suspect_flags([timed])
        self.notes += [note for note in doubts([timed, baseline]) if note not in self.notes]
        if is_suspect_by_load(timed):
            self.notes.append(f"no speed-up at {timed.case}: timing could not be trusted: {suspicions[0]}")
            return
        for flag in suspicions:
            self.refuse("timed", f"{flag} at {timed.case}")
        if timed.timing is None or baseline.timing is None:
            reasons = [baseline.verdict.reason, *(f for f in baseline.flags if f.startswith("not timed"))]
            if baseline.timing is None and (reason := next(filter(None, reasons), "")):
                self.flags.append(f"not timed: the reference: {reason.removeprefix('not timed: ')}")
            return
        time = compare(timed.case, timed.timing, baseline.timing)
        self.times.append(time)
        if not time.comparison.is_known:
            self.notes.append(
                f"no speed-up at {timed.case}: the reference against itself was "
                f"{_range(time.comparison.against_itself.interval)} in this run, so a factor of "
                f"{time.speedup:.2f} may be the machine's"
            )

    def shows_difference(self, case: str) -> bool:
        """True if the times of a case show that the candidate and the reference differ."""
        return any(t.case == case and t.comparison.is_shown for t in self.times)

    def confirm(self, records: Sequence[Record], candidate: str) -> None:
        """Widen the speed-up of a case by that of a second timing, in new processes of both.

        Two processes of the same code may differ, for instance because a library chose another algorithm in
        each (docs/log.md, 2026-11-23).
        """
        timed = next(r for r in records if r.implementation == candidate)
        baseline = next(r for r in records if r.implementation != candidate)
        if timed.timing is None or baseline.timing is None:
            self.leave_out_time(timed.case, "it was not timed there")
            return
        again = compare(timed.case, timed.timing, baseline.timing)
        index = next(i for i, t in enumerate(self.times) if t.case == timed.case)
        first = self.times[index]
        (low, high), (low_again, high_again) = first.comparison.interval, again.comparison.interval
        # The times of the pair that differed less, since the other's may be that of a lucky process.
        chosen = min(first, again, key=lambda t: abs(math.log(t.speedup)))
        interval = min(low, low_again), max(high, high_again)
        both = replace(first.comparison, ratio=chosen.speedup, interval=interval)
        self.times[index] = replace(chosen, comparison=both)
        if not both.is_shown:
            self.notes.append(
                f"no speed-up at {timed.case}: a factor of {first.speedup:.2f} in one pair of processes, and "
                f"of {again.speedup:.2f} in another"
            )

    def leave_out_time(self, case: str, why: str) -> None:
        """Leave out the time of a case whose speed-up was not confirmed."""
        self.times = [t for t in self.times if t.case != case]
        self.notes.append(f"no speed-up at {case}: not confirmed in new processes: {why}")

    def sort_checks(self) -> None:
        """Put the checks into the order of ``ORDER``; the others follow."""
        rank = {name: n for n, name in enumerate(ORDER)}
        self.checks.sort(key=lambda c: rank.get(c.check, len(ORDER)))

    @property
    def comparison(self) -> SpeedUp | None:
        """Speed-up over the timed cases where it is known: geometric means, of the bounds as well."""
        known = [t.comparison for t in self.times if t.comparison.is_known]
        if not known:
            return None
        itself = [c.against_itself for c in known]
        return SpeedUp(
            ratio=_mean([c.ratio for c in known]),
            interval=_mean_interval([c.interval for c in known]),
            against_itself=Ratio(
                value=_mean([r.value for r in itself]),
                interval=_mean_interval([r.interval for r in itself]),
            ),
        )

    @property
    def speedup(self) -> float | None:
        """Geometric mean over the timed cases; None if none is known."""
        comparison = self.comparison
        return comparison.ratio if comparison else None

    def to_json(self) -> dict[str, Any]:
        """Return one object with the keys of the contract and a few more."""
        return {
            "correct": self.correct,
            "reason": self.reason,
            "checks": [{"name": c.check, "status": c.status, "detail": c.detail} for c in self.checks],
            **_speedup_json(self.comparison),
            "time_us": _geometric_mean([t.time_us for t in self.times]),
            "baseline": _geometric_mean([t.baseline_us for t in self.times]),
            "kernels": self.kernels,
            "flags": self.flags,
            "own_check": asdict(self.own) if self.own else None,
            "times": [t.to_json() for t in self.times],
            "format": self.format,
            "operator": self.operator,
            "direction": self.direction,
            "gradients": self.gradients,
            "backend": self.backend,
            "notes": self.notes,
            "problem_bytes": self.problem_bytes,
            "out_of_memory": asdict(self.shortage) if self.shortage else None,
            "seconds_by_step": {step: round(s, 3) for step, s in self.seconds.items()},
            "parts_by_step": {step: _parts_json(times) for step, times in self.parts.items()},
        }


def _parts_json(times: PartTimes) -> dict[str, dict[str, float]]:
    """Return the parts of a step, the longest first."""
    names = sorted(times.seconds, key=times.seconds.__getitem__, reverse=True)
    return {n: {"calls": times.calls[n], "seconds": round(times.seconds[n], 3)} for n in names}


def compare(case: str, candidate: Timing, reference: Timing) -> Time:
    """Return the times at a case, with the speed-up's interval from the samples."""
    speedup = ratio_of_medians(reference.samples, candidate.samples)
    # Also of a sample that is no more than a reading of the clock: no ratio is infinite.
    least = max(reference.minimum, LEAST_US) / max(candidate.minimum, LEAST_US)
    low, high = speedup.interval
    return Time(
        case=case,
        time_us=candidate.cold,
        baseline_us=reference.cold,
        comparison=SpeedUp(
            ratio=speedup.value,
            interval=(min(low, least), max(high, least)),
            # Without a second set, as in an older record, it is compared with all of its samples.
            against_itself=ratio_of_medians(reference.samples, reference.repeated or reference.samples),
        ),
    )


def _speedup_json(comparison: SpeedUp | None) -> dict[str, Any]:
    """Return the keys of a speed-up; ``speedup`` is None where it is not known."""
    itself = comparison.against_itself if comparison else None
    return {
        "speedup": comparison.ratio if comparison and comparison.is_known else None,
        "speedup_interval": list(comparison.interval) if comparison else None,
        "difference_shown": comparison.is_shown if comparison else None,
        "reference_against_itself": {"ratio": itself.value, "interval": list(itself.interval)}
        if itself
        else None,
    }


def _range(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.2f} to {interval[1]:.2f}"


def _geometric_mean(values: Sequence[float]) -> float | None:
    return _mean(values) if values and min(values) > 0 else None


def _mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values."""
    return math.exp(sum(math.log(v) for v in values) / len(values))


def _mean_interval(intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return _mean([low for low, _ in intervals]), _mean([high for _, high in intervals])


def merge_findings(verdicts: Sequence[Verdict]) -> list[Finding]:
    """Return one finding for each rule over all cases: its first failure, else its last pass."""
    merged: dict[str, Finding] = {}
    for verdict in verdicts:
        for finding in verdict.findings:
            rule = finding.check
            if rule in merged and merged[rule].status == FAIL:
                continue
            detail = finding.detail
            if finding.status == FAIL and len(verdicts) > 1:
                detail = f"{finding.detail} at {verdict.case}"
            merged[rule] = Finding(check=rule, status=finding.status, detail=detail)
    shares = [v.tolerance_used for v in verdicts if v.tolerance_used is not None]
    if "error" in merged and merged["error"].status == PASS and shares:
        detail = f"{max(shares):.0%} of the tolerance"
        merged["error"] = Finding(check="error", status=PASS, detail=detail)
    return list(merged.values())
