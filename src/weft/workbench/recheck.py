"""Re-checking the calls that were timed: fresh contents in place, poison, run again, compare.

A candidate that answers rightly when checked and skips the work when timed is caught here: the
inputs' contents change under it, neighbouring calls get different contents, old outputs are NaN,
and at least ``CALLS`` calls in a row are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import numpy as np
import torch

from weft.workbench.slots import (
    MakeSlot,
    Result,
    Slot,
    has_nan,
    poison,
    refill,
    same_bits,
    shares_memory,
    storages,
    tensors_of,
)

Judge = Callable[[Result], str | None]
MakeJudge = Callable[[Slot], Judge]

CALLS = 12  # so that a skip on every tenth call falls among them
CONTENTS = 2
SETTLE = 0.02  # seconds that work left running by a call is given to betray itself
FIRST_SEED = 7_000_000


class Runner(Protocol):
    """What is asked of a prepared candidate: its timed path again, and a plain call."""

    @property
    def calls(self) -> int: ...
    def replay(self) -> list[Result]: ...
    def call(self, index: int) -> Result: ...
    def wait(self) -> None: ...


def _copy(result: Result) -> list[torch.Tensor]:
    return [t.clone() for t in tensors_of(result)]


class Recheck:
    """The contents that the slots are refilled with, and the oracle's judges, shared by all
    candidates of a case.

    Forward, whole inputs are refilled from ``CONTENTS`` sets, so every call's answer is known.
    Backward, only the gradient is (what the forward saved belongs to the old inputs): first, last
    and a random tenth are judged, and the rest must not be poison.
    """

    def __init__(
        self, slots: Sequence[Slot], make_slot: MakeSlot, make_judge: MakeJudge, seed: int
    ) -> None:
        self.slots, self.make_judge = slots, make_judge
        self.backward = slots[0].grad is not None
        self.contents = [make_slot(FIRST_SEED + seed + i) for i in range(CONTENTS)]
        self.judges: dict[Hashable, Judge] = {}
        self.turn = 0
        self.protected = storages(slots)
        picks = np.random.default_rng(seed).integers(0, len(slots), 1 + len(slots) // 10)
        self.chosen = {0, *map(int, picks)}

    def load(self, turn: int) -> None:
        """Refill every slot; neighbours differ, and each slot differs from the turn before."""
        self.turn = turn
        for i, slot in enumerate(self.slots):
            source = self.contents[(i + turn) % CONTENTS]
            if slot.grad is not None and source.grad is not None:
                refill(slot.grad, source.grad)
                continue
            for target, fresh in zip(slot.inputs, source.inputs, strict=True):
                refill(target, fresh)

    def _judge(self, index: int) -> Judge:
        content = (index + self.turn) % CONTENTS
        key = (index, content) if self.backward else content
        if key not in self.judges:
            self.judges[key] = self.make_judge(self.slots[index])
        return self.judges[key]

    def verify(self, outputs: Sequence[Result]) -> str | None:
        """Why these outputs, one a slot from the first on, are wrong; None where they are right."""
        good: dict[int, Result] = {}
        last = len(outputs) - 1
        for i, output in enumerate(outputs):
            content = (i + self.turn) % CONTENTS
            if self.backward and i != last and i not in self.chosen:
                if has_nan(output):
                    return f"timed call {i + 1} of {last + 1} left its output unwritten"
                continue
            if content in good and same_bits(good[content], output):
                continue
            reason = self._judge(i)(output)
            if reason is not None:
                return f"timed call {i + 1} of {last + 1} is wrong: {reason}"
            if not self.backward:
                good[content] = output
        return None

    def candidate(self, runner: Runner) -> str | None:
        """Run a candidate's timed path and its plain call on what is loaded; why it is refused."""
        outputs = runner.replay()
        at_once = [_copy(o) for o in (outputs[0], outputs[-1])]
        runner.wait()
        if shares_memory(outputs):
            return "two timed calls returned the same memory: one overwrites the other's answer"
        reason = self.verify(outputs)
        if reason is None and self.turn == 0:
            time.sleep(SETTLE)
            runner.wait()
            both = zip(at_once, (outputs[0], outputs[-1]), strict=True)
            if not all(same_bits(tuple(then), tuple(tensors_of(now))) for then, now in both):
                reason = "the output changed after the timed calls had returned"
        for output in outputs:
            poison(output, self.protected)
        return reason or self._plain_calls(runner)

    def _plain_calls(self, runner: Runner) -> str | None:
        """Plain calls, each one's answer copied the moment it returns, as the host loop made."""
        copies: list[Result] = []
        first: Result | None = None
        for i in range(runner.calls):
            output = runner.call(i)
            copies.append(tuple(_copy(output)))
            if i == 0:
                first = output
                continue
            poison(output, self.protected)
            del output
        runner.wait()
        assert first is not None
        singles: list[Result] = [c[0] if isinstance(first, torch.Tensor) else c for c in copies]
        reason = self.verify(singles)
        if reason is None and self.turn == 0:
            time.sleep(SETTLE)
            runner.wait()
            if not same_bits(copies[0], tuple(tensors_of(first))):
                reason = "the output changed after the call had returned"
        return reason.replace("timed call", "plain call") if reason else None


def turns(calls: int) -> int:
    """How many refills it takes for ``CALLS`` calls to be compared."""
    return max(1, -(-CALLS // calls))
