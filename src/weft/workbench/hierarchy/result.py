"""What was measured of the hierarchy: curves over sizes, single figures, and both as plain data.

Whatever is shown (text, picture, page) is drawn from this plain data, as a committed record holds
it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.workbench.hierarchy.plateaus import Break, Plateau, find

WITHIN = 0.1  # of a known size: a break that is this close is at it
FAR = 0.75  # doublings: a break further away is another level's

LATENCY, BANDWIDTH = "latency", "bandwidth"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. ``values`` are in ``unit`` over ``sizes`` in bytes; ``ns`` is the same latency in
    nanoseconds where the unit is cycles. ``levels`` names those whose known sizes it may show."""

    key: str
    label: str
    kind: str
    unit: str
    levels: tuple[str, ...]
    sizes: tuple[int, ...]
    values: tuple[float, ...]
    ns: tuple[float, ...] = ()

    def found(self) -> tuple[list[Plateau], list[Break]]:
        """The plateaus and breaks of its cost: of a bandwidth, the time that a byte takes."""
        cost = self.values if self.kind == LATENCY else [1 / v for v in self.values]
        return find(self.sizes, cost)

    def to_json(self, known: Mapping[str, int]) -> dict[str, Any]:
        """Plain data: the curve, its plateaus (``value`` in the unit), breaks, and ``held``: for
        each level, the known size and how far the break is from it by both readings."""
        plateaus, breaks = self.found()
        flat = [
            {"value": self._value(p.cost), "first": int(p.first), "last": int(p.last)}
            | ({"ns": self._ns(p)} if self.ns else {})
            for p in plateaus
        ]
        ends = [
            {
                "leaves": round(b.leaves),
                "holds": round(b.holds),
                "before": self._value(b.before),
                "after": self._value(b.after),
            }
            for b in breaks
        ]
        return {
            "key": self.key,
            "label": self.label,
            "kind": self.kind,
            "unit": self.unit,
            "sizes": list(self.sizes),
            "values": list(self.values),
            **({"ns": list(self.ns)} if self.ns else {}),
            "plateaus": flat,
            "breaks": ends,
            "held": [hold(level, known[level], breaks) for level in self._reached(known)],
        }

    def _reached(self, known: Mapping[str, int]) -> list[str]:
        """The levels that are known and whose end the sizes are large enough to show."""
        most = max(self.sizes, default=0)
        return [level for level in self.levels if known.get(level, most) < most]

    def _value(self, cost: float) -> float:
        return cost if self.kind == LATENCY else 1 / cost

    def _ns(self, plateau: Plateau) -> float:
        inside = [
            ns
            for size, ns in zip(self.sizes, self.ns, strict=True)
            if plateau.first <= size <= plateau.last
        ]
        return sorted(inside)[len(inside) // 2]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number: ``value`` in ``unit``. ``expected``, where something says what it should be, with
    ``by``, who says it."""

    key: str
    label: str
    value: float
    unit: str
    expected: float | None = None
    by: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``off`` is value / expected - 1."""
        said: dict[str, Any] = {
            "key": self.key,
            "label": self.label,
            "value": self.value,
            "unit": self.unit,
        }
        if self.expected:
            off = self.value / self.expected - 1
            said |= {"expected": self.expected, "by": self.by, "off": off}
        return said


def hold(level: str, known: int, breaks: Sequence[Break]) -> dict[str, Any]:
    """The nearest break held against a level's known size in bytes.

    ``leaves_off`` and ``holds_off`` are the two readings / known - 1; ``within`` names those within
    ``WITHIN``. Where no break is within ``FAR`` doublings, these are missing.
    """
    said: dict[str, Any] = {"level": level, "known": known, "within": []}
    near = min(breaks, key=lambda b: _apart(b, known), default=None)
    if near is None or _apart(near, known) > FAR:
        return said
    off = {"leaves": near.leaves / known - 1, "holds": near.holds / known - 1}
    said |= {"leaves": round(near.leaves), "holds": round(near.holds)}
    said |= {f"{reading}_off": value for reading, value in off.items()}
    said["within"] = [reading for reading, value in off.items() if abs(value) <= WITHIN]
    return said


def _apart(one: Break, known: int) -> float:
    return min(abs(math.log2(size / known)) for size in (one.leaves, one.holds))
