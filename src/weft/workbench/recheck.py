"""Re-checking the calls that were timed: fresh contents in place, poison, run again, compare.

A candidate that answers rightly when checked and skips the work when timed is caught here: the
inputs' contents change under it, neighbouring calls get different contents, old outputs are NaN,
and at least ``CALLS`` calls in a row are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from weft.workbench.plan import Answers, Caught, Entrant
from weft.workbench.slots import MakeSlot, Result, Slot, same_bits

Judge = Callable[[Result], str | None]
MakeJudge = Callable[[Slot], Judge]

CALLS = 12  # so that a skip on every tenth call falls among them
CONTENTS = 2


class Recheck:
    """The contents that the slots are refilled with, and the oracle's judges, shared by all
    candidates of a case.

    Forward, whole inputs are refilled from ``CONTENTS`` sets, so every call's answer is known, and
    every one that is at hand is compared. Backward, only the gradient is (what the forward saved
    belongs to the old inputs): first, last and a random tenth are judged, as they are of answers
    that lie in another process, and none may be poison.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        contents: MakeSlot,
        make_judge: MakeJudge,
        fresh: Sequence[int],
        backward: bool,
    ) -> None:
        self.seeds, self.fresh = list(seeds), list(fresh)  # of the slots, and of their contents
        self.contents, self.make_judge, self.backward = contents, make_judge, backward
        self.judges: dict[Hashable, Judge] = {}
        self.turn = 0
        self.random = random.SystemRandom()  # which calls will be looked at, nobody can know
        self.picks: list[float] = []

    def load(self, turn: int) -> None:
        """Begin a turn: other contents in each slot, and other calls to look at."""
        self.turn = turn
        self.picks = [self.random.random() for _ in range(1 + len(self.seeds) // 10)]
        if self.backward:
            self.judges.clear()

    def _content(self, index: int) -> int:
        return self.fresh[(index + self.turn) % len(self.fresh)]

    def _judge(self, index: int) -> Judge:
        content = self._content(index)
        key = (index, content) if self.backward else content
        if key not in self.judges:
            slot = self.contents(content)
            if self.backward:
                grad = slot.grad
                slot = replace(self.contents(self.seeds[index]), grad=grad)
            self.judges[key] = self.make_judge(slot)
        return self.judges[key]

    def chosen(self, calls: int, near: bool) -> list[int]:
        """The calls whose answers are compared."""
        if near and not self.backward:
            return list(range(calls))
        picked = self.picks[: 1 + calls // 10]
        return sorted({0, calls - 1, *(int(p * calls) for p in picked)})

    def verify(self, answers: Answers, near: bool) -> str | None:
        """Why these answers, one a slot from the first on, are wrong; None where they are right."""
        good: dict[int, Result] = {}
        count = len(answers)
        for i, output in answers.pick(self.chosen(count, near)).items():
            content = self._content(i)
            if content in good and same_bits(good[content], output):
                continue
            reason = self._judge(i)(output)
            if reason is not None:
                return f"{answers.label} call {i + 1} of {count} is wrong: {reason}"
            if not self.backward:
                good[content] = output
        return None

    def candidate(self, entrant: Entrant) -> str | None:
        """Run a candidate's timed path and its plain calls on what is due this turn; why it is
        refused."""
        try:
            for answers in entrant.rerun(self.fresh, self.turn):
                reason = self.verify(answers, entrant.near)
                if reason is not None:
                    return reason
        except Caught as caught:
            return str(caught)
        return None


def turns(calls: int, near: bool = True) -> int:
    """How many refills it takes for ``CALLS`` calls to be compared."""
    looked_at = calls if near else min(calls, 2 + calls // 10)
    return max(1, -(-CALLS // looked_at))
