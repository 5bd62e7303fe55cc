"""Curves of the hierarchy over working sets: the sizes to measure, the results, and both as plain data.

All output (text, plot, docs) is generated from this plain data, as a committed record has it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.lab.hierarchy.plateaus import Break, Plateau, find
from weft.machine import Device
from weft.machine.cpu import parse_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
COARSE, FINE = 2, 8  # sizes in a doubling, far from an expected break and near it
NEAR = 0.75  # doublings on either side of an expected break that count as near
WITHIN = 0.1  # relative distance up to which a break agrees with a known size
FAR = 0.75  # doublings; a break further away belongs to another level
LATENCY, BANDWIDTH = "latency", "bandwidth"

# KiB of an SM's L1 cache and shared memory together, by compute capability; no driver reports it.
# Source: CUDA C++ Programming Guide, "Compute Capabilities", the rows on the unified data cache.
UNIFIED_KIB = {
    "sm_75": 96,
    "sm_80": 192,
    "sm_86": 128,
    "sm_87": 192,
    "sm_89": 128,
    "sm_90": 256,
    "sm_100": 256,
    "sm_103": 256,
    "sm_120": 128,
}


def sizes(least: int, most: int, expected: Iterable[int], unit: int) -> list[int]:
    """Return rising sizes in bytes from ``least`` to ``most``, multiples of ``unit``.

    They are geometric: ``COARSE`` in a doubling, and ``FINE`` within ``NEAR`` doublings of an expected
    break.
    """
    exact = {round(least * 2 ** (k / COARSE)) for k in range(200)}
    for size in expected:
        steps = range(-round(NEAR * FINE), round(NEAR * FINE) + 1)
        exact |= {round(size * 2 ** (k / FINE)) for k in steps}
    rounded = {max(unit, round(s / unit) * unit) for s in exact if s <= most}
    return sorted(s for s in rounded | {most // unit * unit} if least <= s <= most)


def known_sizes(device: Device) -> dict[str, int]:
    """Return the bytes of each level that one core, or one SM, can fill; unknown levels are left out.

    A GPU has ``L1`` (with no shared memory taken from it), ``shared`` and ``L2``; a CPU has one core's
    instance of each cache.
    """
    if device.kind == "cpu":
        return per_core(device.caches)
    levels = {
        "L1": UNIFIED_KIB.get(device.arch, 0) * KIB,
        "shared": device.shared_per_sm or 0,
        "L2": device.l2_bytes or 0,
    }
    return {level: size for level, size in levels.items() if size}


def per_core(caches: Mapping[str, int], sys_cpu: Path = Path("/sys/devices/system/cpu")) -> dict[str, int]:
    """Return the size of one instance of each data cache in ``caches``, which has all instances together.

    The sizes are those of the first core that this process may use. A level that /sys does not report
    is left out.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    instances: dict[str, int] = {}
    for index in sorted((sys_cpu / f"cpu{min(allowed)}" / "cache").glob("index[0-9]*")):
        kind, level, size = (_text(index / name) for name in ("type", "level", "size"))
        name = f"L{level}" + ("d" if kind == "Data" else "")
        if name in caches and kind != "Instruction" and (nbytes := parse_size(size)):
            instances[name] = nbytes
    return instances


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve: ``values`` in ``unit`` over ``sizes`` in bytes.

    ``ns`` is the same latency in nanoseconds if the unit is cycles. ``levels`` names the levels whose
    known sizes the curve may show.
    """

    key: str
    label: str
    kind: str
    unit: str
    levels: tuple[str, ...]
    sizes: tuple[int, ...]
    values: tuple[float, ...]
    ns: tuple[float, ...] = ()

    def plateaus_and_breaks(self) -> tuple[list[Plateau], list[Break]]:
        """Return the plateaus and breaks of its cost; the cost of a bandwidth is the time of a byte."""
        cost = self.values if self.kind == LATENCY else [1 / v for v in self.values]
        return find(self.sizes, cost)

    def to_json(self, known: Mapping[str, int]) -> dict[str, Any]:
        """Return plain data: the curve, its plateaus (``value`` in the unit) and breaks.

        ``held`` compares for each level the known size with the break, by both readings.
        """
        plateaus, breaks = self.plateaus_and_breaks()
        plateau_rows = [
            {"value": self._value(p.cost), "first": int(p.first), "last": int(p.last)}
            | ({"ns": self._ns(p)} if self.ns else {})
            for p in plateaus
        ]
        break_rows = [
            {
                "leaves": round(b.leaves),
                "holds": round(b.holds),
                "before": self._value(b.before),
                "after": self._value(b.after),
            }
            for b in breaks
        ]
        # A curve that ends inside a level cannot show that level's end.
        most = max(self.sizes, default=0)
        levels = [level for level in self.levels if known.get(level, most) < most]
        return {
            "key": self.key,
            "label": self.label,
            "kind": self.kind,
            "unit": self.unit,
            "sizes": list(self.sizes),
            "values": list(self.values),
            **({"ns": list(self.ns)} if self.ns else {}),
            "plateaus": plateau_rows,
            "breaks": break_rows,
            "held": [compare_level(level, known[level], breaks) for level in levels],
        }

    def _value(self, cost: float) -> float:
        return cost if self.kind == LATENCY else 1 / cost

    def _ns(self, plateau: Plateau) -> float:
        inside = [
            ns for size, ns in zip(self.sizes, self.ns, strict=True) if plateau.first <= size <= plateau.last
        ]
        return sorted(inside)[len(inside) // 2]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number: ``value`` in ``unit``, and its ``expected`` value with the source of it, ``by``."""

    key: str
    label: str
    value: float
    unit: str
    expected: float | None = None
    by: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain data; ``off`` is value / expected - 1."""
        row: dict[str, Any] = {
            "key": self.key,
            "label": self.label,
            "value": self.value,
            "unit": self.unit,
        }
        if self.expected:
            off = self.value / self.expected - 1
            row |= {"expected": self.expected, "by": self.by, "off": off}
        return row


def compare_level(level: str, known: int, breaks: Sequence[Break]) -> dict[str, Any]:
    """Compare the nearest break with a level's known size in bytes.

    ``leaves_off`` and ``holds_off`` are the two readings / known - 1; ``within`` names those within
    ``WITHIN``. They are missing if no break is within ``FAR`` doublings.
    """
    row: dict[str, Any] = {"level": level, "known": known, "within": []}
    nearest = min(breaks, key=lambda b: _doublings(b, known), default=None)
    if nearest is None or _doublings(nearest, known) > FAR:
        return row
    off = {"leaves": nearest.leaves / known - 1, "holds": nearest.holds / known - 1}
    row |= {"leaves": round(nearest.leaves), "holds": round(nearest.holds)}
    row |= {f"{reading}_off": value for reading, value in off.items()}
    row["within"] = [reading for reading, value in off.items() if abs(value) <= WITHIN]
    return row


def _doublings(edge: Break, known: int) -> float:
    return min(abs(math.log2(size / known)) for size in (edge.leaves, edge.holds))
