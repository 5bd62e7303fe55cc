"""Sample of an operator's checks: every rule, kind of edge and dtype of each implementation, in a minute.

All checks of an operator take up to ten minutes on two cores, where kernels are interpreted and compiled
anew for each case. The sample has two parts. The first is the fewest and cheapest checks that together
show all that the checks of an implementation show. The second is random checks, as many as the time
allows. Another seed gives another sample of both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

from weft.core import FORWARD, Implementation
from weft.workbench.calls.case_kinds import kinds
from weft.workbench.calls.selection import BenchPoint

Trait = tuple[str, ...]
DTYPES = "dtypes"  # the first word of a trait
LEAST_SECONDS = 0.01  # of a check, in a comparison of what checks show for their time


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The points to check, each with the chosen implementations and those that cannot run there.

    ``seconds`` are the expected ones of each check, in the order of the points and their implementations.
    ``checks`` and ``total`` count the checks that can run here, in the sample and in all.
    """

    points: tuple[BenchPoint, ...]
    seconds: tuple[float, ...]
    checks: int
    total: int
    seed: int

    @property
    def is_all(self) -> bool:
        """True if nothing was left out."""
        return self.checks == self.total


def traits(point: BenchPoint) -> frozenset[Trait]:
    """Return all that a check at this point shows of an implementation.

    These are the dtypes; the number of dimensions; each input's layout and values; the kinds of sizes; each
    parameter's value; the tags; and the properties that apply.
    """
    case, operator = point.case, point.operator
    shown: set[Trait] = {("tag", tag) for tag in case.tags}
    shown.add((DTYPES, *(i.dtype for i in case.inputs)))
    shown.add(("dimensions", *(str(len(i.shape)) for i in case.inputs)))
    shown |= {("layout", i.name, i.layout) for i in case.inputs}
    shown |= {("values", i.name, i.values) for i in case.inputs}
    shown |= {("kind", kind) for kind in kinds(case, operator)}
    shown |= {("parameter", name, repr(value)) for name, value in case.params.items()}
    if point.direction == FORWARD:
        shown |= {("property", rule.name) for rule in operator.properties if rule.applies(case)}
    return frozenset(shown)


def _in_direction(shown: frozenset[Trait], direction: str, implementation: Implementation) -> set[Trait]:
    """Return the traits that must be shown in this direction.

    An implementation with a backward of its own has other kernels there, which must meet every edge too.
    The gradient of the others is autograd's: each edge in one direction will do, each dtype in both.
    """
    own_backward = implementation.backward is not None
    return {(direction, *t) if own_backward or t[0] == DTYPES else t for t in shown}


class Cost(Protocol):
    """Seconds of a check: its own, and those of work that it shares with other checks, by key."""

    @property
    def own(self) -> float: ...

    @property
    def shared(self) -> Sequence[tuple[Hashable, float]]: ...


CostOf = Callable[[BenchPoint, Implementation], Cost | None]


def sample(points: Sequence[BenchPoint], cost_of: CostOf, *, budget: float, seed: int) -> Sample:
    """Return a sample of the checks of ``points``; the points of one operator stand together.

    ``cost_of`` returns the expected cost of a check, or None for one that cannot run here; the sample
    keeps these, for their reasons. ``budget`` is the seconds for each operator. It is exceeded where the
    first part of the sample takes longer.
    """
    chosen: list[BenchPoint] = []
    seconds: list[float] = []
    checks = total = 0
    for name, group in groupby(points, key=lambda p: p.operator.name):
        draw = _Draw(list(group), cost_of, random.Random(f"{seed} {name}"))
        draw.choose(budget)
        sampled = draw.sampled_points()
        chosen += sampled
        seconds += draw.seconds_of(sampled)
        checks += len(draw.chosen)
        total += len(draw.costs)
    return Sample(points=tuple(chosen), seconds=tuple(seconds), checks=checks, total=total, seed=seed)


class _Draw:
    """Draw of one operator's checks. A check is the index of its point and the implementation's name."""

    def __init__(self, points: list[BenchPoint], cost_of: CostOf, generator: random.Random) -> None:
        self.points = points
        costs = {(at, i.name): cost_of(p, i) for at, p in enumerate(points) for i in p.implementations}
        self.costs = {check: cost for check, cost in costs.items() if cost is not None}
        self.chosen: set[tuple[int, str]] = set()
        self._spent = 0.0
        self._paid: set[Hashable] = set()
        self._generator = generator

    def choose(self, budget: float) -> None:
        """Choose all checks if ``budget`` seconds suffice; otherwise the two parts of the sample."""
        shared = dict(pair for cost in self.costs.values() for pair in cost.shared)
        if sum(cost.own for cost in self.costs.values()) + sum(shared.values()) <= budget:
            self.chosen = set(self.costs)
            return
        self._cover()
        others = sorted(self.costs.keys() - self.chosen)
        self._generator.shuffle(others)
        for check in others:
            if self._spent + self._seconds(check) <= budget:
                self._add(check)

    def _cover(self) -> None:
        """Choose for each implementation checks that show all of its traits, by a greedy set cover."""
        of_points = [traits(p) for p in self.points]
        # Without a random weight, each sample would have the same cheapest checks.
        weights = [self._generator.uniform(0.5, 1.0) for _ in self.points]
        by_name: dict[str, dict[tuple[int, str], set[Trait]]] = {}
        for at, point in enumerate(self.points):
            for i in point.implementations:
                if (at, i.name) in self.costs:
                    shown = _in_direction(of_points[at], point.direction, i)
                    by_name.setdefault(i.name, {})[at, i.name] = shown
        for checks in by_name.values():
            missing = set().union(*checks.values())
            while missing:

                def gain(
                    check: tuple[int, str],
                    checks: dict[tuple[int, str], set[Trait]] = checks,
                    missing: set[Trait] = missing,
                ) -> float:
                    shown = len(checks[check] & missing) * weights[check[0]]
                    return shown / (self._seconds(check) + LEAST_SECONDS)

                best = max(checks, key=gain)
                self._add(best)
                missing -= checks[best]

    def _seconds(self, check: tuple[int, str]) -> float:
        """Return the expected seconds that a check adds to those already chosen."""
        cost = self.costs[check]
        return cost.own + sum(seconds for key, seconds in cost.shared if key not in self._paid)

    def _add(self, check: tuple[int, str]) -> float:
        seconds = self._seconds(check)
        self._spent += seconds
        self._paid |= {key for key, _ in self.costs[check].shared}
        self.chosen.add(check)
        return seconds

    def seconds_of(self, sampled: list[BenchPoint]) -> list[float]:
        """Return the expected seconds of each check of the sample, 0 for those that cannot run."""
        places = {(p.case.name, p.direction): at for at, p in enumerate(self.points)}
        self._paid.clear()
        checks = [(places[p.case.name, p.direction], i.name) for p in sampled for i in p.implementations]
        return [self._add(check) if check in self.costs else 0.0 for check in checks]

    def sampled_points(self) -> list[BenchPoint]:
        """Return the points with the implementations that are chosen or cannot run there."""
        sampled = []
        for at, point in enumerate(self.points):
            left = tuple(
                i
                for i in point.implementations
                if (at, i.name) in self.chosen or (at, i.name) not in self.costs
            )
            if left:
                sampled.append(replace(point, implementations=left))
        return sampled
