"""Records: build the record of one implementation at a point from its verdict and timing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.core import Ceilings, Implementation, Record, Timing, Verdict
from weft.workbench.calls.selection import BenchPoint
from weft.workbench.timing.plan import is_by_time_alone

# Share by which a time may beat the floor. A GPU's ceiling is steady, so beating it is suspect. A
# CPU's ceiling was measured beside other work and can be beaten honestly: that is only flagged.
MARGIN = {"cuda": 0.02, "cpu": 0.30}
BEATS_FLOOR = {
    "cuda": "suspect: faster than the floor",
    "cpu": "faster than the floor: measure the ceilings again (weft device --measure)",
}


@dataclass(kw_only=True)
class BenchResult:
    """Verdict, timing and observed kernels of one implementation at a point."""

    verdict: Verdict
    first_call_us: float | None = None
    timing: Timing | None = None
    kernels: tuple[str, ...] = ()
    flags: set[str] = field(default_factory=set)


def make_record(
    point: BenchPoint,
    implementation: Implementation,
    result: BenchResult,
    ceilings: Ceilings | None,
    fingerprint: Mapping[str, Any],
) -> Record:
    """Return the record of one implementation at a point.

    Rates and efficiency come from the operator's cost and the ceilings measured on this device.
    """
    cost = point.operator.cost(point.case, point.direction)
    seconds = ceilings.floor(cost) if ceilings else None
    floor = None if seconds is None else seconds * 1e6
    cold = result.timing.cold if result.timing and result.timing.cold > 0 else None
    efficiency = floor / cold if floor and cold else None
    flags = {*result.flags, *(result.timing.flags if result.timing else ())}
    if efficiency is not None and efficiency > 1 + MARGIN[point.device]:
        flags.add(BEATS_FLOOR[point.device])
    return Record(
        operator=point.operator.name,
        implementation=implementation.name,
        backend=implementation.backend_of(point.direction),
        case=point.case.name,
        direction=point.direction,
        verdict=result.verdict,
        timing=result.timing,
        nbytes=cost.nbytes,
        flops=cost.flops,
        rate=cost.rate,
        floor=floor,
        gbps=cost.nbytes / cold / 1e3 if cold else None,
        tflops=cost.flops / cold / 1e6 if cold and cost.flops else None,
        efficiency=efficiency,
        flags=tuple(sorted(flags)),
        machine=fingerprint,
        idea=implementation.idea,
        kernels=result.kernels,
        doubt=ceilings.doubt if ceilings and floor is not None else "",
    )


def busy_reason(records: Sequence[Record]) -> str:
    """Return how busy the machine was while these records were measured; empty if it was quiet.

    The load differs a little from point to point: the first busy one stands for all.
    """
    loads = (r.machine.get("load") for r in records)
    reasons = (str(load.get("busy") or "") for load in loads if isinstance(load, Mapping))
    return next(filter(None, reasons), "")


def suspect_flags(records: Sequence[Record]) -> list[str]:
    """Return the reasons for which the timing checks reject these times, each once."""
    return list(dict.fromkeys(f for r in records for f in r.flags if f.startswith("suspect")))


def is_suspect_by_load(record: Record) -> bool:
    """Return True for a time that is suspect only for reasons that a busy machine causes, on a busy one."""
    suspicions = suspect_flags([record])
    return bool(suspicions and all(map(is_by_time_alone, suspicions)) and busy_reason([record]))


def doubts(records: Sequence[Record]) -> list[str]:
    """Return one sentence for each reason why times or shares of the limit are doubtful."""
    busy = busy_reason([r for r in records if r.timing])
    ceilings = dict.fromkeys(r.doubt for r in records)
    times = [f"the machine was busy ({busy}): times are doubtful"] if busy else []
    shares = [f"shares of the limit marked ~ are doubtful: {reason}" for reason in ceilings if reason]
    return times + shares
