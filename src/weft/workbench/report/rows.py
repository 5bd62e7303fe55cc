"""Records made safe to draw: every number a finite float or None, every text a string.

Records come from strangers' files, and :meth:`Record.from_json` checks names, not types; nothing
after this module needs to ask whether a time is a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft.core.implementation import BACKENDS
from weft.core.record import FAIL, PASS, UNSUPPORTED, Record

COMPOSED = ("eager", "compile")  # what a speed-up is against: the better of these two
OTHER = "other"
HUGE = 1e30  # beyond any time, rate or size that there is; a plot's axis must hold it


def number(value: object) -> float | None:
    """``value`` as a float that can be drawn, or None: not NaN, not infinite, not absurd."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) < HUGE else None


def positive(value: object) -> float | None:
    """``value`` as a finite float above zero, or None: what can stand on a logarithmic axis."""
    found = number(value)
    return found if found is not None and found > 1 / HUGE else None


def texts(value: object) -> tuple[str, ...]:
    """A list of strings from whatever stands where one should."""
    if isinstance(value, str):
        return (value,)
    return tuple(str(v) for v in value) if isinstance(value, Iterable) else ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One record, ready to draw. Times in microseconds; ``efficiency`` is a share of 1.

    ``speedup`` is over the better of eager and compile at the same case, direction and device.
    ``step`` is the number of a ladder's step (``cuda/03-...`` gives 3), else None.
    """

    operator: str
    implementation: str
    backend: str
    case: str
    direction: str
    status: str
    reason: str
    idea: str
    flags: tuple[str, ...]
    cold: float | None
    low: float | None
    high: float | None
    p10: float | None
    p90: float | None
    warm: float | None
    host: float | None
    first: float | None
    floor: float | None
    gbps: float | None
    tflops: float | None
    efficiency: float | None
    nbytes: float | None
    flops: float | None
    rate: str
    tolerance_used: float | None
    findings: tuple[tuple[str, str, str], ...]
    samples: int
    speedup: float | None = None

    @property
    def point(self) -> tuple[str, str, str]:
        """Where this row is compared with others: operator, case, direction."""
        return (self.operator, self.case, self.direction)

    @property
    def timed(self) -> bool:
        return self.cold is not None

    @property
    def step(self) -> int | None:
        _, _, tail = self.implementation.partition("/")
        return int(tail[:2]) if tail[:2].isascii() and tail[:2].isdigit() else None

    @property
    def ours(self) -> bool:
        """Whether Weft wrote the kernel, rather than the library or its compiler."""
        return self.backend in ("triton", "cuda", "numba")

    @property
    def suspect(self) -> bool:
        """Whether the clock did not believe this time: it is shown, and named nobody's best."""
        return any(flag.startswith("suspect") for flag in self.flags)

    @property
    def why(self) -> str:
        """The reason that this row has no time, never empty for one that has none."""
        if self.reason:
            return self.reason
        return "passed, not timed" if self.status == PASS else "no reason was recorded"


def clean(record: Record) -> Row:
    """One record as a row."""
    timing, verdict = record.timing, record.verdict
    low, high = None, None
    if timing is not None and len(timing.interval) == 2:
        low, high = positive(timing.interval[0]), positive(timing.interval[1])
    status = verdict.status if verdict.status in (PASS, FAIL, UNSUPPORTED) else FAIL
    flags = dict.fromkeys(texts(record.flags) + (texts(timing.flags) if timing else ()))
    return Row(
        operator=str(record.operator),
        implementation=str(record.implementation),
        backend=str(record.backend) if record.backend in BACKENDS else OTHER,
        case=str(record.case),
        direction=str(record.direction),
        status=status,
        reason=str(verdict.reason or ""),
        idea=str(record.idea or ""),
        flags=tuple(flags),
        cold=positive(timing.cold) if timing else None,
        low=low,
        high=high,
        p10=positive(timing.p10) if timing else None,
        p90=positive(timing.p90) if timing else None,
        warm=positive(timing.warm) if timing else None,
        host=positive(timing.host) if timing else None,
        first=positive(timing.first) if timing else None,
        floor=positive(record.floor),
        gbps=positive(record.gbps),
        tflops=positive(record.tflops),
        efficiency=positive(record.efficiency),
        nbytes=positive(record.nbytes),
        flops=number(record.flops),
        rate=str(record.rate or ""),
        tolerance_used=number(verdict.tolerance_used),
        findings=tuple((str(f.check), str(f.status), str(f.detail)) for f in verdict.findings),
        samples=len(timing.samples) if timing else 0,
    )


def against_composed(rows: list[Row]) -> list[Row]:
    """The same rows with their speed-up over the better of eager and compile filled in."""
    best: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if row.implementation in COMPOSED and row.cold is not None and row.status == PASS:
            best[row.point] = min(row.cold, best.get(row.point, math.inf))
    return [
        replace(row, speedup=best[row.point] / row.cold)
        if row.cold is not None and row.point in best
        else row
        for row in rows
    ]


def mapping(value: object) -> Mapping[str, Any]:
    """``value`` where it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}
