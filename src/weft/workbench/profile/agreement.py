"""Whether the instruments agree, and whether the folded trace's root is the time on the wall.

Compared are each instrument's fastest steps: whatever else a machine does only ever makes a step
longer, and the instruments take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.workbench.profile.instruments import Reading

LIMIT = 0.05  # that instruments may differ by, the longest over the shortest
ENOUGH = 1000.0  # us a call, from which on they must: below, what a profiler itself takes is seen
ROOT_LIMIT = 0.02  # that the root may differ from the wall by


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """``us`` is a call's time by each instrument."""

    us: Mapping[str, float]

    @property
    def spread(self) -> float:
        """The longest over the shortest, less 1; infinite where an instrument saw nothing."""
        least = min(self.us.values())
        return max(self.us.values()) / least - 1 if least > 0 else float("inf")

    @property
    def demanded(self) -> bool:
        """Whether calls last long enough that the instruments must agree, by any of them."""
        return max(self.us.values()) >= ENOUGH

    @property
    def blind(self) -> list[str]:
        """The instruments that saw nothing run."""
        return [name for name, us in self.us.items() if us <= 0]

    @property
    def good(self) -> bool:
        return not self.blind and (not self.demanded or self.spread <= LIMIT)

    def to_json(self) -> dict[str, Any]:
        return {
            "spread": None if self.blind else self.spread,
            "limit": LIMIT,
            "demanded_from_us": ENOUGH,
            "demanded": self.demanded,
            "good": self.good,
        }


def of(readings: Sequence[Reading]) -> Agreement:
    return Agreement(us={r.instrument: r.least for r in readings})


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
