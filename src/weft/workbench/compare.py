"""compare: is B faster than A? Four answers, from the two intervals and the machine's own noise.

With r = B / A and its interval from the two medians' intervals, and n the noise: ``faster`` where
the whole interval lies below 1 / (1 + n), ``slower`` where it lies above 1 + n, ``same`` where it
lies between, ``ambiguous`` otherwise; so A and B may change places. Where a run ended ``noisy``,
its samples' p10 to p90 stands for its interval in the first two. Nothing is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from weft.core import Record, WeftError
from weft.core.record import FAIL, PASS
from weft.workbench.compare_side import ENOUGH, Range, Side, side, suspicions
from weft.workbench.noise import NOISE, Identity, Noise, identity

FASTER, SLOWER, SAME, AMBIGUOUS = "faster", "slower", "same", "ambiguous"
FAIL_ON = ("slower", "missing", "ambiguous")  # each of them fails on what stands before it too

Key = tuple[str, ...]
Noises = Mapping[Identity, Noise]


@dataclass(frozen=True)
class Comparison:
    """What became of one implementation at one point. ``ratio`` is B / A: under 1 is faster.

    ``verdict`` is None where there is nothing to compare, and ``reason`` says why; with an
    ``ambiguous`` it says what made it so. ``broken`` is an implementation that passed in A and
    fails, is suspect or is gone in B, and ``missing`` one that is gone: not in B, or not timed.
    ``noise_from`` says where the noise came from: "default", "measured", "threshold", "drift"
    within a run, or "runs" that lie apart. ``runs`` are A's and B's.
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
        """The comparison as plain data."""
        return asdict(self)


def machine_of(record: Record) -> tuple[str, ...]:
    """What must be alike for two times to be compared: the device, its architecture, and how many
    of its units (multiprocessors, or threads) there are."""
    return tuple(str(record.machine.get(word) or "") for word in ("device", "arch", "units"))


def names(machines: set[tuple[str, ...]]) -> str:
    """Machines as a person reads them."""

    def told(device: str, arch: str, units: str) -> str:
        more = ", ".join(p for p in (arch, f"{units} units" if units else "") if p)
        return f"{device} ({more})" if more else device

    return " and ".join(sorted(told(*m) for m in machines))


def compare(
    a: Sequence[Record],
    b: Sequence[Record],
    *,
    threshold: float | None = None,
    force: bool = False,
    noises: Noises | None = None,
) -> list[Comparison]:
    """Every implementation of either side, in B's order and then what only A has.

    ``threshold`` is the least difference that counts, as a share. ``noises`` are what was measured
    of the machines (:mod:`weft.workbench.noise`); of others ``NOISE`` of their kind is taken, in
    whose place a threshold stands. Raises :class:`WeftError` where the machines differ, unless
    ``force``.
    """
    if threshold is not None and not 0 <= threshold < 1:
        raise WeftError(
            "--threshold", expected="a share from 0 to 1, e.g. 0.02 for 2 %", got=threshold
        )
    machines = {machine_of(r) for r in a}, {machine_of(r) for r in b}
    if machines[0] != machines[1] and not force:
        raise WeftError(
            "times of unlike machines cannot be compared",
            expected=f"records of {names(machines[0])} on both sides",
            got=names(machines[1]),
            hint="measure both on one machine, or --force to look at the ratios all the same",
        )
    by_key = _gather(a, apart=not force), _gather(b, apart=not force)
    keys = list(dict.fromkeys([*by_key[1], *by_key[0]]))
    return [
        _one(k[:4], by_key[0].get(k, []), by_key[1].get(k, []), threshold, noises or {})
        for k in keys
    ]


def _gather(records: Sequence[Record], *, apart: bool) -> dict[Key, list[Record]]:
    found: dict[Key, list[Record]] = {}
    for r in records:
        key: Key = (r.operator, r.implementation, r.case, r.direction)
        found.setdefault((*key, *machine_of(r)) if apart else key, []).append(r)
    return found


def _one(
    key: Key, a: Sequence[Record], b: Sequence[Record], threshold: float | None, noises: Noises
) -> Comparison:
    one, other = side(a), side(b)
    if one is None or other is None or suspicions(a) or suspicions(b):
        return _nothing(key, a, b)
    # Where both sides are means of several runs, single runs' noise is not theirs.
    fewest = min(one.runs, other.runs)
    pooled = fewest if fewest >= ENOUGH else 1
    noise, noise_from = max(
        least_of(key, a, threshold, noises, pooled),
        least_of(key, b, threshold, noises, pooled),
        (one.noise, one.noise_from),
        (other.noise, other.noise_from),
        key=lambda found: found[0],
    )
    interval = ratio_of(one.interval, other.interval)
    # A run that ended noisy must be told apart by its samples' p10 to p90, not by its median's.
    shaky = one.shaky or other.shaky
    apart = ratio_of(one.spread, other.spread) if shaky else interval
    verdict = decide(interval, apart, noise)
    return Comparison(
        *key,
        verdict=verdict,
        a=one.cold,
        b=other.cold,
        ratio=other.cold / one.cold,
        interval=interval,
        noise=noise,
        noise_from=noise_from,
        runs=(one.runs, other.runs),
        reason=_doubt(one, other, interval, noise, noise_from) if verdict == AMBIGUOUS else "",
    )


def least_of(
    key: Key, records: Sequence[Record], threshold: float | None, noises: Noises, pooled: int = 1
) -> tuple[float, str]:
    """Under what share no difference is called one, and where that comes from: the larger of the
    threshold and the machine's measured noise; with neither, the default of its kind."""
    machine = records[-1].machine
    measured = noises.get(identity(machine))
    found = [] if threshold is None else [(threshold, "threshold")]
    if measured is not None:
        found.append((measured.of(key, pooled), "measured"))
    default = NOISE.get(str(machine.get("kind")), max(NOISE.values()))
    return max(found, key=lambda one: one[0]) if found else (default, "default")


def ratio_of(low_high_a: Range, low_high_b: Range) -> Range:
    """The least and the largest B / A, from a range of each side."""
    return low_high_b[0] / low_high_a[1], low_high_b[1] / low_high_a[0]


def decide(interval: Range, apart: Range, noise: float) -> str:
    """The verdict at a noise: ``apart`` is the ratio's range that must clear it for a difference,
    ``interval`` the one that must stay within it for none."""
    low, high = 1 / (1 + noise), 1 + noise
    if apart[1] < low:
        return FASTER
    if apart[0] > high:
        return SLOWER
    if interval[0] >= low and interval[1] <= high:
        return SAME
    return AMBIGUOUS


def _doubt(one: Side, other: Side, interval: Range, noise: float, noise_from: str) -> str:
    """Why neither a difference nor its absence could be shown."""
    if one.shaky or other.shaky:
        where = " and ".join(n for n, s in (("A", one), ("B", other)) if s.shaky)
        return f"a run of {where} ended noisy: its interval is too wide, or its samples too few"
    if noise_from == "drift":
        return f"the times wandered by {noise:.1%} within a run"
    if noise_from == "runs":
        return f"runs of one commit lie {noise:.1%} apart; {ENOUGH} or more a side say more"
    return f"{interval[0]:.3f} to {interval[1]:.3f} reaches over the edge of the noise"


def _nothing(key: Key, a: Sequence[Record], b: Sequence[Record]) -> Comparison:
    good = bool(a) and a[-1].verdict.status == PASS and not suspicions(a)
    failed = bool(b) and b[-1].verdict.status == FAIL
    untimed = side(a) is not None and side(b) is None
    gone = good and (not b or untimed) and not failed
    broken = good and (failed or gone or bool(suspicions(b)))
    return Comparison(*key, verdict=None, reason=_why(a, b), broken=broken, missing=gone)


def _why(a: Sequence[Record], b: Sequence[Record]) -> str:
    for name, records in (("A", a), ("B", b)):
        if not records:
            return f"not in {name}"
        if side(records) is None:
            last = records[-1]
            said = last.verdict.reason or "; ".join(last.flags) or "not timed"
            return f"{last.verdict.status} in {name}: {said}"
        if suspicions(records):
            return f"not to be believed in {name}: {'; '.join(suspicions(records))}"
    return ""


def counts(found: Sequence[Comparison]) -> dict[str, int]:
    """How many of each verdict; ``none`` are those with nothing to compare, and ``broken`` those
    of them that passed before."""
    seen = Counter(c.verdict or "none" for c in found)
    broken = sum(c.broken for c in found)
    return {w: seen[w] for w in (FASTER, SLOWER, SAME, AMBIGUOUS, "none")} | {"broken": broken}


def against(found: Sequence[Comparison], fail_on: str = "missing") -> list[Comparison]:
    """What a gate stops at: ``slower`` is what became slower, fails or is suspect now, ``missing``
    (the default) also what passed and is gone, ``ambiguous`` also what could not be decided."""
    if fail_on not in FAIL_ON:
        raise WeftError("--fail-on", expected=" or ".join(FAIL_ON), got=fail_on)
    level = FAIL_ON.index(fail_on)

    def stops(c: Comparison) -> bool:
        if c.missing:
            return level >= FAIL_ON.index("missing")
        return c.verdict == SLOWER or c.broken or (level == 2 and c.verdict == AMBIGUOUS)

    return [c for c in found if stops(c)]
