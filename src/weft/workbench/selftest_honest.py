"""Honest runs: Weft's own implementations, checked again and again on fresh seeds, never refused.

A false alarm is worth as much as a survivor: who is refused for nothing stops to listen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice

from weft import backends
from weft.core import Implementation, Operator, Verdict, registry
from weft.core.record import FAIL, PASS
from weft.workbench.check import check

OPERATORS = ("softmax", "gelu", "sum", "matmul")
MOST = 1 << 17  # elements of an input: a run is to take seconds
INTERPRETED = 1 << 10  # where a thread at a time is run by Python


@dataclass(frozen=True, kw_only=True)
class Honest:
    """``runs`` of one implementation each over its cases, the verdicts in them, false alarms."""

    runs: int
    verdicts: int
    alarms: tuple[Verdict, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "runs": self.runs,
            "verdicts": self.verdicts,
            "false_alarms": [
                {
                    "operator": v.operator,
                    "implementation": v.implementation,
                    "case": v.case,
                    "direction": v.direction,
                    "reason": v.reason,
                }
                for v in self.alarms
            ],
        }


def run(count: int, device: str, on_done: Callable[[str, int, int], None] | None = None) -> Honest:
    """``count`` runs: each takes the next implementation that can run here over all its check and
    edge cases (but the largest), in both directions, on seeds of its own. What is interpreted here
    (Triton and numba on a CPU) takes the small ones."""
    verdicts, alarms = 0, []
    for number, (operator, one) in enumerate(islice(cycle(_able(device)), count), 1):
        failed = 0
        for verdict in _one_run(operator, one, device):
            verdicts += verdict.status in (PASS, FAIL)
            if verdict.status == FAIL:
                failed += 1
                alarms.append(verdict)
        if on_done is not None:
            on_done(f"{operator.name} {one.name}: {failed} false alarms", number, count)
    return Honest(runs=count, verdicts=verdicts, alarms=tuple(alarms))


def _able(device: str) -> list[tuple[Operator, Implementation]]:
    found = []
    for operator in map(registry.operator, OPERATORS):
        for one in registry.implementations(operator.name):
            cases = operator.select("check", device)
            if not one.is_step and any(backends.support(one, c, device) for c in cases):
                found.append((operator, one))
    return found


def _one_run(operator: Operator, one: Implementation, device: str) -> Iterator[Verdict]:
    for case in operator.cases:
        if not {"check", "edge"} & case.tags or device not in case.devices:
            continue
        support = backends.support(one, case, device)
        if max(i.numel for i in case.inputs) > (MOST if support.timed else INTERPRETED):
            continue
        for direction in operator.directions:
            yield check(operator, one, case, direction, device)
