"""Kernels that are right in single calls, and wrong in calls that follow each other at once.

They return an earlier answer, by the time between their calls, by the number of calls in a row, or by inputs
that come again shortly. On a GPU the calls of a graph follow each other when it is captured, so that the
samples show most of them too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, honest, is_timed, plant

AT_ONCE = 5e-4  # seconds between two calls of a row, at most
LONG = 20  # calls in a row
RECENT = 4  # calls in which an input comes again in a row; in a sample it does not
STEADY = 12  # pauses of about the same length


class Calls:
    """The calls so far in a row: their pauses, inputs and answers."""

    def __init__(self) -> None:
        self.ended = 0.0
        self.length = 0
        self.pauses: deque[float] = deque(maxlen=STEADY)
        self.recent: deque[int] = deque(maxlen=RECENT)
        self.answers: deque[torch.Tensor] = deque(maxlen=2)

    def begin(self) -> None:
        pause = time.perf_counter() - self.ended
        self.pauses.append(pause)
        self.length += 1
        if pause > AT_ONCE:
            self.length = 0
            self.recent.clear()

    def end(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.answers.append(y)
        self.recent.append(x.data_ptr())
        self.ended = time.perf_counter()


def _stale(operator: str, is_due: Callable[[Calls, torch.Tensor], bool], ago: int) -> Callable[[], Forward]:
    """Return the answer of so many calls ago where it is due, in calls of a timing."""

    def make() -> Forward:
        calls = Calls()

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            if not is_timed(x[0]):
                return honest(operator)(*x, **params)  # type: ignore[no-any-return]
            calls.begin()
            due = len(calls.answers) >= ago and is_due(calls, x[0])
            y = calls.answers[-ago].clone() if due else honest(operator)(*x, **params)
            calls.end(x[0], y)
            return y  # type: ignore[no-any-return]

        return forward

    return make


def _in_a_long_row(calls: Calls, x: torch.Tensor) -> bool:
    return calls.length > LONG


def _at_once(calls: Calls, x: torch.Tensor) -> bool:
    return calls.length > 2


def _steadily(calls: Calls, x: torch.Tensor) -> bool:
    second, *_, last_but_one, _ = sorted(calls.pauses)[1:] if len(calls.pauses) == STEADY else (0.0, 1.0, 1.0)
    return last_but_one < 2 * second and last_but_one < AT_ONCE


def _again(calls: Calls, x: torch.Tensor) -> bool:
    return x.data_ptr() in calls.recent


def _mutants() -> Iterator[Mutant]:
    also = "rows sampled recheck fresh"
    for identity, title, checks, due, ago in (
        ("C25/gelu/eager/again", "the last answer where an input comes again at once", "rows", _again, 1),
        ("C25/softmax/eager/long-row", "the last answer in a long row of calls", also, _in_a_long_row, 1),
        ("C25/matmul/eager/two-ago", "the answer before the last in calls at once", also, _at_once, 2),
        ("C25/gelu/eager/steady", "the last answer once pauses are alike", also, _steadily, 1),
    ):
        yield plant(
            identity,
            title,
            checks,
            _stale(identity.split("/")[1], due, ago),
            phase="bench",
            only="rows" if checks == "rows" else "",
        )


MUTANTS = tuple(_mutants())
