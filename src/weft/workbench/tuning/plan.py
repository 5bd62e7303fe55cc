"""Plan of ``weft tune``: the cases whose measurement tells dispatch most, within a time limit.

A case is uncertain if it is far from every measured point, and if its predicted times leave the choice open.
The most uncertain case comes first; those near it are then less uncertain. On a card that borrows another
device's table every case is uncertain by an octave more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.core import FORWARD, Case, Implementation, Operator, registry
from weft.dispatch import choice, keys
from weft.dispatch.choice import BASELINES, Device, Kind
from weft.workbench.calls.selection import BenchPoint
from weft.workbench.durations import expected_bench_seconds
from weft.workbench.timing.plan import Budget

LIMIT_SECONDS = 600.0
# Short enough for some fifty points in ten minutes; the intervals of a choice may be wide.
BUDGET = Budget(
    seconds=1.5, warmup=0.2, min_samples=10, target_width=0.01, side_samples=5, recheck_seconds=0.5
)
UNKNOWN = 20.0  # octaves of a case with no measured point of its kind
BORROWED = 1.0  # octaves added to a case whose points are another device's
OPEN = 0.25  # octaves between ours and the baseline at which a choice is half as open as at equal times
FULL_VALUE_US = 20.0  # a shorter call is worth less: a launch takes most of it, whichever kernel runs
BANDWIDTH = 3e12  # bytes/s, of the guess where no point of the kind is known
LEAST = 0.5  # uncertainty below which a case is not measured again


@dataclass(kw_only=True)
class PlannedCase:
    """A case that may be measured: expected ``seconds``, octaves to the nearest known point, and ``gap``, the
    octaves between the predicted times of ours and the baseline. ``us`` is torch's predicted time."""

    operator: Operator
    case: Case
    seconds: float
    kind: Kind
    sizes: keys.Sizes
    octaves: float
    gap: float
    us: float
    covered: list[keys.Sizes] = field(default_factory=list)

    @property
    def uncertainty(self) -> float:
        """Return how much a measurement would tell; 0 for what is known."""
        distances = [keys.distance(self.operator.name, self.sizes, s) for s in self.covered]
        value = min(1.0, self.us / FULL_VALUE_US)
        return value * min([self.octaves, *distances]) / (OPEN + self.gap)


def can_be_chosen(implementation: Implementation) -> bool:
    """Return True for what dispatch may choose: no ladder's step, and nothing that compiles by shape."""
    return not implementation.is_step and implementation.backend != "compile"


def measured(operator: str, names: Sequence[str] | None = None) -> tuple[Implementation, ...]:
    """Return the implementations of an operator that tuning measures; ``names``: only those."""
    known = filter(can_be_chosen, registry.implementations(operator))
    return tuple(i for i in known if names is None or i.name in names)


def point_seconds(
    operator: Operator, case: Case, device: str, budget: Budget, names: Sequence[str] | None = None
) -> float:
    """Return the expected seconds of measuring a case in all directions."""
    points = [
        BenchPoint(
            operator=operator,
            case=case,
            direction=direction,
            device=device,
            baseline=None,
            implementations=measured(operator.name, names),
        )
        for direction in operator.directions
    ]
    return sum(expected_bench_seconds(points, budget))


def plan(
    candidates: Sequence[tuple[Operator, Case]],
    device: str,
    gpu: Device,
    limit: float = LIMIT_SECONDS,
    names: Sequence[str] | None = None,
) -> list[PlannedCase]:
    """Return the most uncertain of these cases, in the order of measurement; ``limit`` seconds in all.

    ``names`` are the implementations that will be measured; None: all that dispatch may choose.
    """
    remaining = [_planned(operator, case, device, gpu, names) for operator, case in candidates]
    chosen: list[PlannedCase] = []
    left = limit
    while remaining:
        # Of equals the first: an operator's own bench cases come before those that are scaled down.
        best = max(remaining, key=lambda c: c.uncertainty)
        remaining.remove(best)
        if best.uncertainty < LEAST:
            break
        if best.seconds > left:
            continue
        left -= best.seconds
        chosen.append(best)
        for other in remaining:
            if other.kind == best.kind:
                other.covered.append(best.sizes)
    return chosen


def _planned(
    operator: Operator, case: Case, device: str, gpu: Device, names: Sequence[str] | None
) -> PlannedCase:
    key = keys.lookup_key(operator.name, case.inputs, case.params)
    kind = Kind(operator.name, gpu, key.dtype, key.flags, grad=False, captured=True)
    points, octaves = choice.nearest(kind, key.sizes)
    gap, us = 0.0, sum(i.nbytes for i in case.inputs) / BANDWIDTH * 1e6
    if not points:
        octaves = UNKNOWN
    else:
        own = choice.table(gpu)
        octaves += BORROWED if own.borrowed or points[0] not in own.points else 0.0
        times = getattr(choice.predict(points[0], kind, key.sizes), FORWARD)
        ours = [cold for name, (cold, _) in times.items() if name not in BASELINES]
        base = [times[name][0] for name in BASELINES if name in times]
        if base:
            us = min(base)
        if ours and base:
            gap = abs(math.log2(max(min(ours), 1e-3) / max(min(base), 1e-3)))
    return PlannedCase(
        operator=operator,
        case=case,
        seconds=point_seconds(operator, case, device, BUDGET, names),
        kind=kind,
        sizes=key.sizes,
        octaves=min(octaves, UNKNOWN),
        gap=gap,
        us=us,
    )
