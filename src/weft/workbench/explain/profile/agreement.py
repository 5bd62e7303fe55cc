"""Agreement of the instruments, and of the folded trace's root with the wall time.

The reference is our own instrument: CUDA events, or on a CPU the clock. The time of a call changes from
one second to the next, on a CPU with other work on the machine, on a GPU with the clocks that its power
allows. So each profiler is compared with our own reading of the very steps that it observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.workbench.explain.profile.instruments import Reading

LIMIT = 0.05  # largest allowed difference of the instruments, the longest time over the shortest
REQUIRED_FROM = 1000.0  # us a call from which they must agree: below, the profiler's own time shows
ROOT_LIMIT = 0.02  # largest allowed difference of the root from the wall time


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Comparison of ``readings``, of which our own instrument's is the first."""

    readings: Sequence[Reading]

    def ratio(self, reading: Reading) -> float:
        """Return an instrument's time of its steps over ours; 0 if it saw nothing, 1 for our own."""
        reference = sum(reading.reference)
        return sum(reading.samples) / reference if reference > 0 else 0.0

    @property
    def spread(self) -> float:
        """Largest ratio over the smallest, less 1; infinite if an instrument saw nothing."""
        ratios = [self.ratio(reading) for reading in self.readings]
        # Ratios to the own clock, not times: each instrument observed other steps.
        return max(ratios) / min(ratios) - 1 if min(ratios) > 0 else float("inf")

    @property
    def required(self) -> bool:
        """True if calls last long enough, by any instrument, that they must agree."""
        return max(reading.fastest for reading in self.readings) >= REQUIRED_FROM

    @property
    def blind(self) -> list[str]:
        """Names of the instruments that saw nothing run."""
        return [reading.instrument for reading in self.readings if reading.fastest <= 0]

    @property
    def good(self) -> bool:
        return not self.blind and (not self.required or self.spread <= LIMIT)

    def to_json(self) -> dict[str, Any]:
        return {
            "compared": "the same steps",
            "spread": None if self.blind else self.spread,
            "limit": LIMIT,
            "demanded_from_us": REQUIRED_FROM,
            "demanded": self.required,
            "good": self.good,
        }


@dataclass(frozen=True, kw_only=True)
class Root:
    """Root of the folded trace and the time of the same steps by our own clock, both in us."""

    root_us: float
    wall_us: float

    @property
    def gap(self) -> float:
        """Excess of the root over the wall time, as a share of the wall time."""
        return self.root_us / self.wall_us - 1

    @property
    def good(self) -> bool:
        return abs(self.gap) <= ROOT_LIMIT

    def to_json(self) -> dict[str, Any]:
        times = {"root_us": self.root_us, "wall_us": self.wall_us, "gap": self.gap}
        return times | {"limit": ROOT_LIMIT, "good": self.good}
