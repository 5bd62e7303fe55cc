"""What judging a foreign candidate came to, as data: the machine-readable contract."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.core import Finding, Record, Verdict
from weft.core.record import FAIL, PASS, UNSUPPORTED

NOT_RUN = "not run"
ORDER = ("import", "returns", "type", "shape", "dtype", "device", "layout", "alias", "inputs")


@dataclass(frozen=True, kw_only=True)
class OwnCheck:
    """What the file's own check says: ``passed`` is None where it could not be asked."""

    passed: bool | None
    detail: str
    rule: str


@dataclass(frozen=True, kw_only=True)
class Time:
    """The medians (us) at one case, and how many times faster than the reference it is."""

    case: str
    time_us: float
    baseline_us: float

    @property
    def speedup(self) -> float:
        return self.baseline_us / self.time_us if self.time_us else math.inf


@dataclass(kw_only=True)
class Judgement:
    """A verdict on a candidate. ``reason`` is one line, empty where it is right."""

    format: str
    operator: str
    backend: str = ""
    correct: bool = False
    reason: str = ""
    checks: list[Finding] = field(default_factory=list)
    own: OwnCheck | None = None
    times: list[Time] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, check: str, why: str, status: str = FAIL) -> None:
        """Against it, for this reason; the first one stays."""
        self.checks = [c for c in self.checks if c.check != check]
        self.checks.append(Finding(check=check, status=status, detail=why))
        self.correct = False
        if not self.reason:
            self.reason = f"{check}: {why}" if status == FAIL else f"{NOT_RUN}: {why}"

    @property
    def speedup(self) -> float | None:
        """The geometric mean over the timed cases."""
        return _mean([t.speedup for t in self.times])

    def to_json(self) -> dict[str, Any]:
        """One object with the keys of the contract, and some beside."""
        own = self.own
        return {
            "correct": self.correct,
            "reason": self.reason,
            "checks": [
                {"name": c.check, "status": c.status, "detail": c.detail} for c in self.checks
            ],
            "speedup": self.speedup,
            "time_us": _mean([t.time_us for t in self.times]),
            "baseline": _mean([t.baseline_us for t in self.times]),
            "kernels": self.kernels,
            "flags": self.flags,
            "own_check": asdict(own) if own else None,
            "times": [asdict(t) | {"speedup": t.speedup} for t in self.times],
            "format": self.format,
            "operator": self.operator,
            "backend": self.backend,
            "notes": self.notes,
        }


def _mean(values: Sequence[float]) -> float | None:
    if not values or min(values) <= 0:
        return None
    return math.exp(sum(math.log(v) for v in values) / len(values))


def merged(verdicts: Sequence[Verdict]) -> list[Finding]:
    """One finding a rule over all cases: the failure where there is one, else the last pass."""
    found: dict[str, Finding] = {}
    for verdict in verdicts:
        for one in verdict.findings:
            if one.check in found and found[one.check].status == FAIL:
                continue
            detail = one.detail
            if one.status == FAIL and len(verdicts) > 1:
                detail = f"{one.detail} at {verdict.case}"
            found[one.check] = Finding(check=one.check, status=one.status, detail=detail)
    shares = [v.tolerance_used for v in verdicts if v.tolerance_used is not None]
    if "error" in found and found["error"].status == PASS and shares:
        detail = f"{max(shares):.0%} of the tolerance"
        found["error"] = Finding(check="error", status=PASS, detail=detail)
    return list(found.values())


def take_verdicts(into: Judgement, verdicts: Sequence[Verdict]) -> None:
    """Put the check's verdicts into a judgement: right only if every case passed."""
    into.checks += merged(verdicts)
    failed = next((v for v in verdicts if v.status == FAIL), None)
    left_out = next((v for v in verdicts if v.status == UNSUPPORTED), None)
    if failed is not None:
        many = len(verdicts) > 1 and failed.case not in failed.reason
        into.reason = f"{failed.reason}{f' at {failed.case}' if many else ''}"
    elif left_out is not None:
        into.refuse("case", f"{left_out.reason} ({left_out.case})", NOT_RUN)
    else:
        into.correct = bool(verdicts)


def take_records(into: Judgement, records: Sequence[Record], candidate: str) -> None:
    """Put a timed case's records into a judgement; a refusal of the clock's is one of ours."""
    theirs = next(r for r in records if r.implementation == candidate)
    others = next(r for r in records if r.implementation != candidate)
    into.flags += [f for f in theirs.flags if f not in into.flags]
    into.kernels += [k for k in theirs.kernels if k not in into.kernels]
    if theirs.verdict.status == FAIL:
        into.refuse("timed", f"{theirs.verdict.reason} at {theirs.case}")
        return
    for flag in theirs.flags:
        if flag.startswith("suspect"):
            into.refuse("timed", f"{flag} at {theirs.case}")
    if theirs.timing and others.timing:
        cold = (theirs.timing.cold, others.timing.cold)
        into.times.append(Time(case=theirs.case, time_us=cold[0], baseline_us=cold[1]))


def sorted_checks(checks: Sequence[Finding]) -> list[Finding]:
    """In the order that a reader expects: the file, the form, the values, the rest."""
    place: Mapping[str, int] = {name: n for n, name in enumerate(ORDER)}
    return sorted(checks, key=lambda c: place.get(c.check, len(ORDER)))
