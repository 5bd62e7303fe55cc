"""Counters of one kernel launch, and the ratios of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.workbench.explain.ncu.counters import STALLS, by_key
from weft.workbench.explain.ncu.output import Row
from weft.workbench.kernels.names import plain

LIMITERS = {
    "registers": "registers",
    "shared_mem": "shared memory",
    "warps": "the block's size",
    "blocks": "blocks an SM can hold",
}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Kernel launch; ``counters`` are by the keys of :mod:`counters`, without those that were not read.

    Units are bytes, microseconds, and percent from 0 to 100.
    """

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    counters: Mapping[str, float]

    @staticmethod
    def from_row(row: Row) -> Kernel:
        return Kernel(name=row.name, grid=row.grid, block=row.block, counters=by_key(row.values))

    def to_json(self) -> dict[str, Any]:
        shape = {"grid": list(self.grid), "block": list(self.block)}
        return {"name": self.name, **shape, "counters": dict(self.counters)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Kernel:
        """Read the output of :meth:`to_json`; raises ValueError, KeyError or TypeError for other data."""
        # json reads NaN and Infinity, which no counter can be.
        if not all(math.isfinite(v) for v in data["counters"].values()):
            raise ValueError("a counter is not a finite number")
        return Kernel(
            name=str(data["name"]),
            grid=tuple(map(int, data["grid"])),
            block=tuple(map(int, data["block"])),
            counters={str(k): float(v) for k, v in data["counters"].items()},
        )

    def get(self, key: str) -> float | None:
        return self.counters.get(key)

    def _ratio(self, numerator: str, denominator: str) -> float | None:
        a, b = self.get(numerator), self.get(denominator)
        return a / b if a is not None and b else None

    @property
    def short(self) -> str:
        return plain(self.name)

    @property
    def us(self) -> float:
        return self.get("duration") or 0.0

    def sectors(self, op: str) -> float | None:
        """Return the sectors a request of global loads (``ld``) or stores (``st``).

        A warp that accesses 32 adjacent words has 4 sectors for 4-byte words and 16 for 16-byte words; a
        warp whose threads access 32 different sectors has 32.
        """
        return self._ratio(f"{op}_sectors", f"{op}_requests")

    def conflicts(self, op: str | None = None) -> float | None:
        """Return the share of shared memory's wavefronts, 0 to 1, that bank conflicts added."""
        ops = (op,) if op else ("ld", "st")
        wavefronts = [self.get(f"shared_{o}") for o in ops]
        added = [self.get(f"conflicts_{o}") for o in ops]
        if None in wavefronts or None in added or not sum(w or 0.0 for w in wavefronts):
            return None
        # Counters of different passes can differ slightly, so the ratio is limited to 1.
        return min(1.0, sum(c or 0.0 for c in added) / sum(w or 0.0 for w in wavefronts))

    @property
    def spilled(self) -> float | None:
        """Bytes of local memory that the L1 loaded and stored."""
        parts = [self.get("local_ld"), self.get("local_st")]
        return None if None in parts else sum(p or 0.0 for p in parts)

    @property
    def limiter(self) -> str:
        """Resource that limits the blocks on an SM; empty if it was not read."""
        limits = {resource: self.get(f"limit_{resource}") for resource in LIMITERS}
        known = {resource: n for resource, n in limits.items() if n is not None}
        return LIMITERS[min(known, key=lambda w: known[w])] if known else ""

    @property
    def stalls(self) -> list[tuple[str, float]]:
        """Stall reasons with their share, 0 to 1, of the cycles between a warp's instructions, largest first.

        The cycle in which the warp issues is one of these cycles.
        """
        waits = {r: self.get(f"stall_{r}") or 0.0 for r in STALLS}
        # With the cycle in which it issues, or the shares of a busy warp would look like waiting.
        total = sum(waits.values()) + (self.get("stall_selected") or 0.0)
        shares = [(r, w / total) for r, w in waits.items() if w > 0 and total > 0]
        return sorted(shares, key=lambda share: -share[1])

    @property
    def busiest(self) -> tuple[str, float] | None:
        """Unit nearest to its peak, with its percent of peak, 0 to 100."""
        units = {"DRAM": "dram_peak", "the L2": "l2_peak", "the SMs": "sm_peak"}
        known = {unit: v for unit, key in units.items() if (v := self.get(key)) is not None}
        return max(known.items(), key=lambda item: item[1]) if known else None
