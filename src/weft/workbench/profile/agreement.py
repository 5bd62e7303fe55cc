"""Whether the instruments agree, and whether the folded trace's root is the time on the wall.

Our own instrument is what the others are held against: CUDA events, or on a CPU the clock. What a
call takes changes from one second to the next, on a CPU with whatever else the machine does, on a
GPU with the clocks that its power allows; so a profiler is held against our own instrument's
reading of the very steps that it looked at, and not against another turn's.
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
    """``readings``, our own instrument's first."""

    readings: Sequence[Reading]

    def ratio(self, one: Reading) -> float:
        """What this instrument says of its steps over what ours says of them; 0 where it saw
        nothing, 1 for our own."""
        whole = sum(one.beside)
        return sum(one.samples) / whole if whole > 0 else 0.0

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
            "compared": "the same steps",
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
