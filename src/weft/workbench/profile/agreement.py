"""Whether the instruments agree, and whether the folded trace's root is the time on the wall.

The first instrument, the clock, is what the others are held against. On a GPU each says how long
a call takes when it is its turn, and the fastest steps are compared. On a CPU what a call takes on
the wall changes with whatever else the machine does, from one second to the next; so a profiler is
held against our own clock's reading of the very steps that it looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.workbench.profile.instruments import Reading

LIMIT = 0.05  # that instruments may differ by, the longest over the shortest
ENOUGH = 1000.0  # us a call, from which on they must: below, what a profiler itself takes is seen
ROOT_LIMIT = 0.02  # that the root may differ from the wall by


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """``readings``, the clock's first; ``paired`` says that the others are held against the clock's
    reading of their own steps."""

    readings: Sequence[Reading]
    paired: bool

    def ratio(self, one: Reading) -> float:
        """What this instrument says over what the clock says of the same; 0 where it saw nothing.

        The clock itself: 1.
        """
        first = self.readings[0]
        if self.paired:
            return sum(one.samples) / sum(one.walls) if one is not first else 1.0
        return one.least / first.least if first.least > 0 else 0.0

    @property
    def spread(self) -> float:
        """The longest over the shortest, less 1; infinite where an instrument saw nothing."""
        ratios = [self.ratio(one) for one in self.readings]
        return max(ratios) / min(ratios) - 1 if min(ratios) > 0 else float("inf")

    @property
    def demanded(self) -> bool:
        """Whether calls last long enough that the instruments must agree, by any of them."""
        return max(one.least for one in self.readings) >= ENOUGH

    @property
    def blind(self) -> list[str]:
        """The instruments that saw nothing run."""
        return [one.instrument for one in self.readings if one.least <= 0]

    @property
    def good(self) -> bool:
        return not self.blind and (not self.demanded or self.spread <= LIMIT)

    def to_json(self) -> dict[str, Any]:
        return {
            "compared": "the same steps" if self.paired else "each one's fastest step",
            "spread": None if self.blind else self.spread,
            "limit": LIMIT,
            "demanded_from_us": ENOUGH,
            "demanded": self.demanded,
            "good": self.good,
        }


@dataclass(frozen=True, kw_only=True)
class Root:
    """The root of the folded trace, and the time of the same steps by our own clock, both in us."""

    root_us: float
    wall_us: float

    @property
    def gap(self) -> float:
        """How much longer the root is, as a share of the wall time."""
        return self.root_us / self.wall_us - 1

    @property
    def good(self) -> bool:
        return abs(self.gap) <= ROOT_LIMIT

    def to_json(self) -> dict[str, Any]:
        told = {"root_us": self.root_us, "wall_us": self.wall_us, "gap": self.gap}
        return told | {"limit": ROOT_LIMIT, "good": self.good}
