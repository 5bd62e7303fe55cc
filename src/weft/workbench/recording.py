"""Recording: what is known of one implementation at a point, as a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.core import Ceilings, Implementation, Record, Timing, Verdict
from weft.workbench.points import Point

# By how much a time may beat the floor. A GPU's ceiling is steady, so that beating it is suspect; a
# CPU's was measured among whatever else ran then and can be beaten honestly: it is only flagged.
MARGIN = {"cuda": 0.02, "cpu": 0.30}
BEATEN = {
    "cuda": "suspect: faster than the floor",
    "cpu": "faster than the floor: measure the ceilings again (weft device --measure)",
}


@dataclass(kw_only=True)
class Found:
    """What is known of one implementation at a point, as it goes through check and clock."""

    verdict: Verdict
    first: float | None = None
    timing: Timing | None = None
    kernels: tuple[str, ...] = ()
    flags: set[str] = field(default_factory=set)


def make_record(
    point: Point,
    implementation: Implementation,
    found: Found,
    ceilings: Ceilings | None,
    fingerprint: Mapping[str, Any],
) -> Record:
    """The record of one implementation at a point; rates and efficiency from the operator's cost
    and the ceilings measured on this device."""
    cost = point.operator.cost(point.case, point.direction)
    seconds = ceilings.floor(cost) if ceilings else None
    floor = None if seconds is None else seconds * 1e6
    cold = found.timing.cold if found.timing and found.timing.cold > 0 else None
    efficiency = floor / cold if floor and cold else None
    flags = {*found.flags, *(found.timing.flags if found.timing else ())}
    if efficiency is not None and efficiency > 1 + MARGIN[point.device]:
        flags.add(BEATEN[point.device])
    return Record(
        operator=point.operator.name,
        implementation=implementation.name,
        backend=implementation.backend_of(point.direction),
        case=point.case.name,
        direction=point.direction,
        verdict=found.verdict,
        timing=found.timing,
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
        kernels=found.kernels,
    )
