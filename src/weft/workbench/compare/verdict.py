"""Compare two sets of records: faster, slower, same or ambiguous, by interval and noise.

A is the baseline and B the candidate. With r = B / A, its interval from the intervals of the two medians,
and n the noise, the verdict is

- ``faster`` if the whole interval lies below 1 / (1 + n),
- ``slower`` if it lies above 1 + n,
- ``same`` if it lies between the two,
- ``ambiguous`` otherwise, and in place of ``same`` wherever n is above the visible difference: the
  threshold, or ``VISIBLE``. ``same`` therefore says that a difference of that size would have been seen.

A side that was measured on a busy machine has a noise of ``BUSY_NOISE`` at least.
The rule is symmetric: swapping A and B turns faster into slower. For a run that ended ``noisy`` the first
two use p10 to p90 of its samples in place of the interval. Nothing is run here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from weft.core import Record, WeftError
from weft.core.record import FAIL, PASS
from weft.workbench.compare.noise import DEFAULT_NOISE, MachineKey, Noise, machine_key
from weft.workbench.compare.sides import MIN_POOLED_RUNS, Range, SideTime, side_time
from weft.workbench.records import busy_reason, suspect_flags

FASTER, SLOWER, SAME, AMBIGUOUS = "faster", "slower", "same", "ambiguous"
NOT_COMPARED = "none"  # in counts: points without a verdict
VISIBLE = 0.05  # a point is `same` only if this difference would have been seen, without a threshold
# Other processes can make a run slower by this share throughout, which no interval shows.
BUSY_NOISE = 0.5
NOISE_CAUSES = {
    "drift": "drift within a run",
    "runs": "the distance between runs of one commit",
    "busy": "because the machine was busy",
    "default": "the default for this kind of device",
}
FAIL_ON = ("slower", "missing", "ambiguous")  # each level includes those before it

Key = tuple[str, ...]
NoiseByMachine = Mapping[MachineKey, Noise]


@dataclass(frozen=True)
class Comparison:
    """Comparison of one implementation at one point; the JSON output has these field names.

    ``a`` and ``b`` are the times (us) and ``ratio`` is B / A: under 1 is faster. ``verdict`` is None
    without two times to compare. ``reason`` explains a missing or ``ambiguous`` verdict. ``broken`` is
    True if the implementation passed in A and fails, is suspect or is missing in B; ``missing`` is True if
    it is not in B or not timed there. ``noise_from`` is the source of ``noise``: "default", "measured",
    "threshold", "drift" within a run, the distance between "runs", or a "busy" machine. ``runs`` counts the
    runs of A and B.
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
    interval: Range | None = None
    noise: float | None = None
    noise_from: str = ""
    runs: tuple[int, int] | None = None
    reason: str = ""
    broken: bool = False
    missing: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return asdict(self)


def machine_of(record: Record) -> tuple[str, ...]:
    """Return what must be equal for times to be comparable.

    These are the device, its architecture, and its number of units (SMs of a GPU, threads of a CPU).
    """
    return tuple(str(record.machine.get(field) or "") for field in ("device", "arch", "units"))


def machine_names(machines: set[tuple[str, ...]]) -> str:
    """Return machines as readable text."""

    def name(device: str, arch: str, units: str) -> str:
        details = ", ".join(p for p in (arch, f"{units} units" if units else "") if p)
        return f"{device} ({details})" if details else device

    return " and ".join(sorted(name(*m) for m in machines))


def compare(
    baseline: Sequence[Record],
    candidate: Sequence[Record],
    *,
    threshold: float | None = None,
    force: bool = False,
    noises: NoiseByMachine | None = None,
) -> list[Comparison]:
    """Compare every implementation of either side: in B's order, then those that only A has.

    ``threshold`` is the smallest difference that counts, as a share. ``noises`` holds the measured noise
    of machines (:mod:`weft.workbench.compare.noise`). Other machines have ``threshold``, or without one
    the default noise of their kind.

    Raises :class:`WeftError` if the machines differ, unless ``force``.
    """
    if threshold is not None and not 0 <= threshold < 1:
        raise WeftError("--threshold", expected="a share from 0 to 1, e.g. 0.02 for 2 %", got=threshold)
    before_machines, after_machines = {machine_of(r) for r in baseline}, {machine_of(r) for r in candidate}
    if before_machines != after_machines and not force:
        raise WeftError(
            "times of unlike machines cannot be compared",
            expected=f"records of {machine_names(before_machines)} on both sides",
            got=machine_names(after_machines),
            hint="measure both on one machine, or use --force to see the ratios anyway",
        )
    # With force the machines differ, so the machine cannot be a part of the key.
    before, after = _by_key(baseline, by_machine=not force), _by_key(candidate, by_machine=not force)
    return [
        # The machine is the rest of the key.
        _compare_point(key[:4], before.get(key, []), after.get(key, []), threshold, noises or {})
        for key in dict.fromkeys([*after, *before])  # B's order first, each key once
    ]


def _by_key(records: Sequence[Record], *, by_machine: bool) -> dict[Key, list[Record]]:
    groups: dict[Key, list[Record]] = {}
    for r in records:
        key: Key = (r.operator, r.implementation, r.case, r.direction)
        groups.setdefault((*key, *machine_of(r)) if by_machine else key, []).append(r)
    return groups


def _compare_point(
    key: Key,
    baseline: Sequence[Record],
    candidate: Sequence[Record],
    threshold: float | None,
    noises: NoiseByMachine,
) -> Comparison:
    before, after = side_time(baseline), side_time(candidate)
    if before is None or after is None or suspect_flags(baseline) or suspect_flags(candidate):
        return _without_verdict(key, baseline, candidate)
    # The noise of single runs shrinks only if both sides are means of several runs.
    fewest = min(before.runs, after.runs)
    pooled = fewest if fewest >= MIN_POOLED_RUNS else 1
    noise, noise_from = max(
        _machine_noise(key, baseline, threshold, noises, pooled),
        _machine_noise(key, candidate, threshold, noises, pooled),
        (before.noise, before.noise_from),
        (after.noise, after.noise_from),
        _busy_noise(baseline),
        _busy_noise(candidate),
        key=lambda pair: pair[0],
    )
    interval = ratio_range(before.interval, after.interval)
    # The interval of a noisy run is not reliable, so a difference must show between p10 and p90.
    noisy = before.noisy or after.noisy
    separating = ratio_range(before.spread, after.spread) if noisy else interval
    visible = visible_difference(threshold)
    verdict = decide(interval, separating, noise, visible)
    reason = ""
    if verdict == AMBIGUOUS:
        reason = _ambiguity(before, after, interval, noise, noise_from, visible)
    return Comparison(
        *key,
        verdict=verdict,
        a=before.cold,
        b=after.cold,
        ratio=after.cold / before.cold,
        interval=interval,
        noise=noise,
        noise_from=noise_from,
        runs=(before.runs, after.runs),
        reason=reason,
    )


def visible_difference(threshold: float | None) -> float:
    """Return the difference, as a share, that must have been visible for a point to be ``same``."""
    return VISIBLE if threshold is None else threshold


def _busy_noise(records: Sequence[Record]) -> tuple[float, str]:
    return (BUSY_NOISE, "busy") if busy_reason(records) else (0.0, "")


def _machine_noise(
    key: Key, records: Sequence[Record], threshold: float | None, noises: NoiseByMachine, pooled: int
) -> tuple[float, str]:
    """Return the smallest difference that counts on this machine, as a share, and its source.

    It is the larger of the threshold and the measured noise; with neither, the default.
    """
    machine = records[-1].machine
    measured = noises.get(machine_key(machine))
    shares = [] if threshold is None else [(threshold, "threshold")]
    if measured is not None:
        shares.append((measured.of(key, pooled), "measured"))
    return max(shares, key=lambda pair: pair[0]) if shares else (default_noise(machine), "default")


def default_noise(machine: Mapping[str, Any]) -> float:
    """Return the noise of a machine without a measurement, by its kind of device."""
    # An unknown kind of device has the larger noise, which gives fewer false alarms.
    return DEFAULT_NOISE.get(str(machine.get("kind")), max(DEFAULT_NOISE.values()))


def ratio_range(baseline: Range, candidate: Range) -> Range:
    """Return the smallest and the largest B / A, from a range of each side."""
    # The extremes of a quotient of intervals: the bounds of A divide crosswise.
    return candidate[0] / baseline[1], candidate[1] / baseline[0]


def decide(interval: Range, separating: Range, noise: float, visible: float = VISIBLE) -> str:
    """Return the verdict at a noise.

    All of ``separating`` must lie outside the noise for a difference, and all of ``interval`` inside it for
    ``same``. Both are ranges of B / A. A noise above ``visible`` (a share) is never ``same``.
    """
    # The lower edge is the inverse of the upper one, so that swapping A and B mirrors the verdict.
    low, high = 1 / (1 + noise), 1 + noise
    if separating[1] < low:
        return FASTER
    if separating[0] > high:
        return SLOWER
    # Within so much noise a difference that matters would look the same.
    if noise <= visible and interval[0] >= low and interval[1] <= high:
        return SAME
    return AMBIGUOUS


def _ambiguity(
    before: SideTime, after: SideTime, interval: Range, noise: float, noise_from: str, visible: float
) -> str:
    """Return why neither a difference nor equality was shown."""
    if noise > visible:
        unseen = f"a difference of {visible:.1%} would not have been seen"
        return f"the noise is {noise:.1%}, {NOISE_CAUSES.get(noise_from, 'as measured here')}: {unseen}"
    if before.noisy or after.noisy:
        names = " and ".join(name for name, side in (("A", before), ("B", after)) if side.noisy)
        return f"a run of {names} ended noisy: its interval is too wide, or it has too few samples"
    if noise_from == "drift":
        return f"the times drifted by {noise:.1%} within a run"
    if noise_from == "runs":
        return f"runs of one commit differ by {noise:.1%}; measure {MIN_POOLED_RUNS} or more a side"
    return f"the interval {interval[0]:.3f} to {interval[1]:.3f} crosses the edge of the noise"


def _without_verdict(key: Key, baseline: Sequence[Record], candidate: Sequence[Record]) -> Comparison:
    passed = bool(baseline) and baseline[-1].verdict.status == PASS and not suspect_flags(baseline)
    failed = bool(candidate) and candidate[-1].verdict.status == FAIL
    # A candidate without a time is missing even if a record says that it passed.
    lost_time = side_time(baseline) is not None and side_time(candidate) is None
    missing = passed and (not candidate or lost_time) and not failed
    broken = passed and (failed or missing or bool(suspect_flags(candidate)))
    reason = _reason(baseline, candidate)
    return Comparison(*key, verdict=None, reason=reason, broken=broken, missing=missing)


def _reason(baseline: Sequence[Record], candidate: Sequence[Record]) -> str:
    for name, records in (("A", baseline), ("B", candidate)):
        if not records:
            return f"not in {name}"
        if side_time(records) is None:
            last = records[-1]
            details = last.verdict.reason or "; ".join(last.flags) or "not timed"
            return f"{last.verdict.status} in {name}: {details}"
        if suspect_flags(records):
            return f"rejected by the timing checks in {name}: {'; '.join(suspect_flags(records))}"
    return ""


def counts(comparisons: Sequence[Comparison]) -> dict[str, int]:
    """Return the number of each verdict, of points without one (``none``), and of broken ones."""
    by_verdict = Counter(c.verdict or NOT_COMPARED for c in comparisons)
    broken = sum(c.broken for c in comparisons)
    verdicts = (FASTER, SLOWER, SAME, AMBIGUOUS, NOT_COMPARED)
    return {v: by_verdict[v] for v in verdicts} | {"broken": broken}


def failures(comparisons: Sequence[Comparison], fail_on: str = "missing") -> list[Comparison]:
    """Return the comparisons that fail the gate.

    ``slower`` takes what is slower, fails or is suspect in B; ``missing`` (the default) also what passed
    in A and is missing in B; ``ambiguous`` also what is ambiguous.
    """
    if fail_on not in FAIL_ON:
        raise WeftError("--fail-on", expected=" or ".join(FAIL_ON), got=fail_on)
    level = FAIL_ON.index(fail_on)

    def fails(c: Comparison) -> bool:
        # Missing is also broken, but `--fail-on slower` allows it.
        if c.missing:
            return level >= FAIL_ON.index("missing")
        # 2 is the place of "ambiguous" in FAIL_ON.
        return c.verdict == SLOWER or c.broken or (level == 2 and c.verdict == AMBIGUOUS)

    return [c for c in comparisons if fails(c)]
