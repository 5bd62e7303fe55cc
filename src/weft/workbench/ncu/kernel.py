"""A kernel's counters, and what follows from them by one division."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.workbench.kernel_names import plain
from weft.workbench.ncu.counters import STALLS, keyed
from weft.workbench.ncu.output import Row

LIMITERS = {
    "registers": "registers",
    "shared_mem": "shared memory",
    "warps": "the block's size",
    "blocks": "blocks an SM can hold",
}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch. ``counters`` are by the keys of :mod:`counters`; one that was not read is not
    there. Bytes, microseconds, and percent from 0 to 100."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    counters: Mapping[str, float]

    @staticmethod
    def of(row: Row) -> Kernel:
        return Kernel(name=row.name, grid=row.grid, block=row.block, counters=keyed(row.values))

    def to_json(self) -> dict[str, Any]:
        shape = {"grid": list(self.grid), "block": list(self.block)}
        return {"name": self.name, **shape, "counters": dict(self.counters)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Kernel:
        """What :meth:`to_json` wrote; raises a ValueError (or its like) on another shape."""
        if not all(math.isfinite(v) for v in data["counters"].values()):
            raise ValueError("a counter that is no finite number")
        return Kernel(
            name=str(data["name"]),
            grid=tuple(map(int, data["grid"])),
            block=tuple(map(int, data["block"])),
            counters={str(k): float(v) for k, v in data["counters"].items()},
        )

    def get(self, key: str) -> float | None:
        return self.counters.get(key)

    def _ratio(self, above: str, below: str) -> float | None:
        a, b = self.get(above), self.get(below)
        return a / b if a is not None and b else None

    @property
    def short(self) -> str:
        return plain(self.name)

    @property
    def us(self) -> float:
        return self.get("duration") or 0.0

    def sectors(self, op: str) -> float | None:
        """Sectors a request of global loads (``ld``) or stores (``st``): 4 where a warp takes 32
        neighbouring words of 4 bytes, 16 of 16 bytes, up to 32 where each thread goes elsewhere."""
        return self._ratio(f"{op}_sectors", f"{op}_requests")

    def conflicts(self, op: str | None = None) -> float | None:
        """The share of shared memory's wavefronts, 0 to 1, that bank conflicts added."""
        ops = (op,) if op else ("ld", "st")
        made = [self.get(f"shared_{o}") for o in ops]
        added = [self.get(f"conflicts_{o}") for o in ops]
        if None in made or None in added or not sum(w or 0.0 for w in made):
            return None
        return min(1.0, sum(c or 0.0 for c in added) / sum(w or 0.0 for w in made))

    @property
    def spilled(self) -> float | None:
        """Bytes of local memory that went through the L1, both ways."""
        parts = [self.get("local_ld"), self.get("local_st")]
        return None if None in parts else sum(p or 0.0 for p in parts)

    @property
    def limiter(self) -> str:
        """What lets no more blocks onto an SM; empty where that was not read."""
        limits = {what: self.get(f"limit_{what}") for what in LIMITERS}
        known = {what: n for what, n in limits.items() if n is not None}
        return LIMITERS[min(known, key=lambda w: known[w])] if known else ""

    @property
    def stalls(self) -> list[tuple[str, float]]:
        """Each reason with its share, 0 to 1, of the cycles between a warp's instructions, the
        largest first; that in which it issues counts as one of these cycles."""
        waits = {r: self.get(f"stall_{r}") or 0.0 for r in STALLS}
        whole = sum(waits.values()) + (self.get("stall_selected") or 0.0)
        shares = [(r, w / whole) for r, w in waits.items() if w > 0 and whole > 0]
        return sorted(shares, key=lambda one: -one[1])

    @property
    def busiest(self) -> tuple[str, float] | None:
        """The unit that is nearest to its peak, and how near, 0 to 100."""
        units = {"DRAM": "dram_peak", "the L2": "l2_peak", "the SMs": "sm_peak"}
        known = {unit: v for unit, key in units.items() if (v := self.get(key)) is not None}
        return max(known.items(), key=lambda one: one[1]) if known else None
