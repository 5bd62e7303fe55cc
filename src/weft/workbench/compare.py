"""compare: is B faster than A? Four answers, from the two intervals and the machine's own noise.

With r = B / A and its interval from the two medians' intervals, and n the noise: ``faster`` where
the whole interval lies below 1 - n, ``slower`` where it lies above 1 + n, ``same`` where it lies
between, ``ambiguous`` otherwise. Where a run ended ``noisy``, its samples' p10 to p90 stands for
its interval in the first two. Nothing is run.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from weft.core import Record, Timing, WeftError
from weft.core.record import FAIL, PASS
from weft.workbench.statistics import drift

FASTER, SLOWER, SAME, AMBIGUOUS = "faster", "slower", "same", "ambiguous"
# Between two runs of the same thing a median moves by more than its interval says: other pages,
# another temperature. Smaller differences than these are never called one.
NOISE = {"cuda": 0.01, "cpu": 0.05}
FEW = 20  # samples under which a bootstrap interval is too narrow to be trusted

Key = tuple[str, ...]
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One implementation's time on one side, from one record or several runs' (us)."""

    cold: float
    interval: tuple[float, float]
    spread: tuple[float, float]
    noise: float
    shaky: bool
    runs: int


@dataclass(frozen=True)
class Comparison:
    """What became of one implementation at one point. ``ratio`` is B / A: under 1 is faster.

    ``verdict`` is None where there is nothing to compare, and ``reason`` says why; ``broken`` is an
    implementation that passed in A and fails in B.
    """

    operator: str
    implementation: str
    case: str
    direction: str
    _: KW_ONLY
    verdict: str | None
    a: float | None = None
    b: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    noise: float | None = None
    reason: str = ""
    broken: bool = False

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return asdict(self)


def machine_of(record: Record) -> tuple[str, str]:
    """What must be alike for two times to be compared: the device and its architecture."""
    return str(record.machine.get("device")), str(record.machine.get("arch"))


def compare(
    a: Sequence[Record],
    b: Sequence[Record],
    *,
    threshold: float | None = None,
    force: bool = False,
) -> list[Comparison]:
    """Every implementation of either side, in B's order and then what only A has.

    ``threshold`` is the least difference that counts, as a share (default: ``NOISE`` of the
    device's kind). Raises :class:`WeftError` where the machines differ, unless ``force``.
    """
    if threshold is not None and not 0 <= threshold < 1:
        raise WeftError(
            "--threshold", expected="a share from 0 to 1, e.g. 0.02 for 2 %", got=threshold
        )
    machines = {machine_of(r) for r in a}, {machine_of(r) for r in b}
    if machines[0] != machines[1] and not force:
        raise WeftError(
            "times of unlike machines cannot be compared",
            expected=f"records of {_names(machines[0])} on both sides",
            got=_names(machines[1]),
            hint="measure both on one machine, or --force to look at the ratios all the same",
        )
    by_key = _gather(a, apart=not force), _gather(b, apart=not force)
    keys = list(dict.fromkeys([*by_key[1], *by_key[0]]))
    return [_one(k[:4], by_key[0].get(k, []), by_key[1].get(k, []), threshold) for k in keys]


def _names(machines: set[tuple[str, str]]) -> str:
    return " and ".join(sorted(f"{device} ({arch})" for device, arch in machines))


def _gather(records: Sequence[Record], *, apart: bool) -> dict[Key, list[Record]]:
    found: dict[Key, list[Record]] = {}
    for r in records:
        key: Key = (r.operator, r.implementation, r.case, r.direction)
        found.setdefault((*key, *machine_of(r)) if apart else key, []).append(r)
    return found


def _one(key: Key, a: Sequence[Record], b: Sequence[Record], threshold: float | None) -> Comparison:
    one, other = side(a), side(b)
    if one is None or other is None:
        broken = _last(a) == PASS and _last(b) == FAIL
        return Comparison(*key, verdict=None, reason=_why(a, b), broken=broken)
    kind = str(b[-1].machine.get("kind"))
    least = NOISE.get(kind, max(NOISE.values())) if threshold is None else threshold
    noise = max(least, one.noise, other.noise)
    interval = ratio_of(one.interval, other.interval)
    # A run that ended noisy must be told apart by its samples' p10 to p90, not by its median's.
    shaky = one.shaky or other.shaky
    apart = ratio_of(one.spread, other.spread) if shaky else interval
    return Comparison(
        *key,
        verdict=decide(interval, apart, noise),
        a=one.cold,
        b=other.cold,
        ratio=other.cold / one.cold,
        interval=interval,
        noise=noise,
    )


def ratio_of(low_high_a: Range, low_high_b: Range) -> Range:
    """The least and the largest B / A, from a range of each side."""
    return low_high_b[0] / low_high_a[1], low_high_b[1] / low_high_a[0]


def decide(interval: Range, apart: Range, noise: float) -> str:
    """The verdict at a noise: ``apart`` is the ratio's range that must clear it for a difference,
    ``interval`` the one that must stay within it for none."""
    if apart[1] < 1 - noise:
        return FASTER
    if apart[0] > 1 + noise:
        return SLOWER
    if interval[0] >= 1 - noise and interval[1] <= 1 + noise:
        return SAME
    return AMBIGUOUS


def side(records: Sequence[Record]) -> Side | None:
    """What the timed records of one implementation say together; None where none was timed.

    Several runs: the median of their medians, the hull of their intervals, and how far the runs lie
    apart as noise.
    """
    timings = [r.timing for r in records if r.timing and r.timing.cold > 0]
    if not timings or _last(records) == FAIL:
        return None
    colds = [t.cold for t in timings]
    middle = statistics.median(colds)
    noises = [_drift(t) for t in timings]
    if len(timings) > 1:
        noises.append((max(colds) - min(colds)) / middle)
    return Side(
        cold=middle,
        interval=(min(t.interval[0] for t in timings), max(t.interval[1] for t in timings)),
        spread=(min(t.p10 for t in timings), max(t.p90 for t in timings)),
        noise=max(noises),
        shaky=any(_shaky(t) for t in timings),
        runs=len(timings),
    )


def _clean(timing: Timing) -> tuple[float, ...]:
    """The samples that were not throttled: those stand last."""
    kept = timing.samples[: len(timing.samples) - timing.throttled]
    return kept or timing.samples


def _drift(timing: Timing) -> float:
    return drift(_clean(timing))


def _shaky(timing: Timing) -> bool:
    """Whether the run ended without the interval that a median's name rests on."""
    return "noisy" in timing.flags or len(_clean(timing)) < FEW


def _last(records: Sequence[Record]) -> str | None:
    return records[-1].verdict.status if records else None


def _why(a: Sequence[Record], b: Sequence[Record]) -> str:
    for name, records in (("A", a), ("B", b)):
        if not records:
            return f"not in {name}"
        if side(records) is None:
            last = records[-1]
            said = last.verdict.reason or "; ".join(last.flags) or "not timed"
            return f"{last.verdict.status} in {name}: {said}"
    return ""


def counts(found: Sequence[Comparison]) -> dict[str, int]:
    """How many of each verdict; ``none`` are those with nothing to compare."""
    seen = Counter(c.verdict or "none" for c in found)
    return {word: seen[word] for word in (FASTER, SLOWER, SAME, AMBIGUOUS, "none")}


def differences(a: Sequence[Record], b: Sequence[Record]) -> list[str]:
    """What else differs between two sides of like machines: driver, versions, commit."""

    def told(records: Sequence[Record]) -> Mapping[str, Any]:
        here = records[-1].machine
        versions = {f"{k} version": v for k, v in (here.get("versions") or {}).items()}
        return {"driver": here.get("driver"), "power limit": here.get("power_limit_w"), **versions}

    one, other = told(a), told(b)
    keys = [k for k in one if k in other and one[k] != other[k]]
    return [f"{k}: {one[k]} in A, {other[k]} in B" for k in keys]
