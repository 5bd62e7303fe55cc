"""Seconds that a selftest will still take, from those of the finished rows of the same kind.

A row is killed by one call or goes through thousands: a control in CUDA C++ takes a hundred times as long as
a wrong kernel in PyTorch. So the durations of one kind say little of another's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from weft.workbench.selftest.mutants.mutant import Mutant

# Seconds of each step before any is measured, on two cores; a control goes through every case.
STEP_SECONDS = {"check": 4.0, "kernels": 2.0, "clock": 4.0}
CONTROL_FACTOR = 5.0
ALONE = "clock"  # the step in which nothing else runs
KERNEL_CHECKS = {"provenance", "observed"}

Kind = tuple[str, str, bool, bool]  # step, backend, whether it is a control, and a problem of another suite


@dataclass
class Durations:
    """Seconds of the finished rows of a kind, and the number of those that wait or run."""

    expected: float
    left: int = 0
    n_done: int = 0
    seconds: float = 0.0


@dataclass
class RemainingTime:
    """Estimate of the remaining seconds: call it. ``jobs`` rows run at once, except while timing."""

    jobs: int = 1
    clock: Callable[[], float] = time.monotonic
    kinds: dict[Kind, Durations] = field(default_factory=dict)
    _changed: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def plan(self, rows: Iterable[tuple[Mutant, tuple[str, ...]]]) -> None:
        """Add rows with the steps that each goes through; one that is to be killed stops there."""
        self._changed = self.clock()
        for mutant, steps in rows:
            for step in steps:
                self._kind(step, mutant).left += 1
                if not mutant.honest and len(steps) > 1 and self._is_meant_for(step, mutant):
                    break

    @staticmethod
    def _is_meant_for(step: str, mutant: Mutant) -> bool:
        return step == ("kernels" if KERNEL_CHECKS & set(mutant.killed_by) else ALONE)

    def _kind(self, step: str, mutant: Mutant) -> Durations:
        key = (step, mutant.backend, mutant.honest, mutant.problem is not None)
        expected = STEP_SECONDS[step] * (CONTROL_FACTOR if mutant.honest and step == "check" else 1.0)
        return self.kinds.setdefault(key, Durations(expected))

    def finish(self, step: str, mutant: Mutant, seconds: float) -> None:
        """Count a step of a row as done."""
        with self._lock:
            kind = self._kind(step, mutant)
            kind.left = max(0, kind.left - 1)
            kind.n_done += 1
            kind.seconds += seconds
            self._changed = self.clock()

    def __call__(self) -> float:
        """Return the seconds that are left."""
        with self._lock:
            total = 0.0
            for (step, *_), kind in self.kinds.items():
                total += kind.left * self._mean(step, kind) / (1 if step == ALONE else self.jobs)
            # A long row does not stop the clock.
            return max(0.0, total - (self.clock() - self._changed)) if total else 0.0

    def _mean(self, step: str, kind: Durations) -> float:
        """Return the mean of a kind; before any of it is done, its expectation by others of the step."""
        if kind.n_done:
            return kind.seconds / kind.n_done
        others = [k for (s, *_), k in self.kinds.items() if s == step and k.n_done]
        expected = sum(k.n_done * k.expected for k in others)
        return kind.expected * (sum(k.seconds for k in others) / expected if expected else 1.0)
