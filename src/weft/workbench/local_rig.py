"""A rig together with the slots it was bound to: what only the process that holds both can do.

New contents in place, poison over old answers, and a look at the memory that answers lie in. The
same code runs beside the judge and in a stranger's process, which then ships the answers asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.workbench.guard import replaced
from weft.workbench.plan import Caught, Plan, Rig
from weft.workbench.slots import (
    Leading,
    MakeSlot,
    Result,
    Slot,
    poison,
    refill_slot,
    same_bits,
    shares_memory,
    storages,
    tensors_of,
    unwritten,
)

SETTLE = 0.02  # seconds that work left running by a call is given to betray itself
KEPT = 2  # contents that are kept for the next who needs them


class Contents:
    """Slots drawn from seeds, the last two of them kept: every candidate of a race is given the
    same ones after another."""

    def __init__(self, make_slot: MakeSlot) -> None:
        self.make_slot = make_slot
        self._kept: dict[int, Slot] = {}

    def __call__(self, seed: int) -> Slot:
        if seed not in self._kept:
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[seed] = self.make_slot(seed)
        return self._kept[seed]


@dataclass(frozen=True)
class Held:
    """Answers that lie in this process."""

    label: str
    results: Sequence[Result]

    def __len__(self) -> int:
        return len(self.results)

    def pick(self, indexes: Sequence[int]) -> Mapping[int, Result]:
        return {i: self.results[i] for i in indexes}


class LocalRig:
    """A rig of this process and its slots; ``contents(seed)`` draws what they are refilled with."""

    near = True

    def __init__(self, rig: Rig, slots: Sequence[Slot], contents: MakeSlot) -> None:
        self.rig, self.slots, self.contents = rig, slots, contents
        self.protected = storages(slots)
        self.plan: Plan = rig.plan
        self.flags = rig.flags
        self.sample, self.warm, self.host = rig.sample, rig.warm, rig.host
        self.cross_check = rig.cross_check

    @property
    def calls(self) -> int:
        return self.rig.calls

    @property
    def audited(self) -> int:
        return self.rig.audited

    def replaced(self) -> list[str]:
        return replaced()

    def audit(self, seeds: Sequence[int]) -> tuple[float | None, Held]:
        """The time (us a call) of calls on contents that nobody has seen, and their answers.

        Raises :class:`Caught` for answers that share memory.
        """
        for slot, seed in zip(self.slots, seeds, strict=False):
            refill_slot(slot, self.contents(seed))
        us, outputs = self.rig.once(len(seeds))
        self.rig.wait()
        _apart(outputs)
        return us, Held("timed", outputs)

    def audited_again(self, calls: int) -> float | None:
        """The same once more, on what these calls have seen by now."""
        us, _ = self.rig.once(calls)
        self.rig.wait()
        return us

    def rerun(self, seeds: Sequence[int], turn: int) -> Iterator[Held]:
        """Refill, run the timed path and yield its answers; then plain calls and theirs.

        Neighbouring slots get different contents, and each other ones than the turn before.
        Raises :class:`Caught` for answers that share memory, change later or were never written.
        """
        for i, slot in enumerate(self.slots):
            refill_slot(slot, self.contents(seeds[(i + turn) % len(seeds)]))
        outputs = self.rig.replay()
        at_once = [_copy(o) for o in (outputs[0], outputs[-1])]
        self.rig.wait()
        _apart(outputs)
        yield Held("timed", outputs)
        _all_written("timed", outputs)
        if turn == 0 and self._changed(at_once, [outputs[0], outputs[-1]]):
            raise Caught("the output changed after the timed calls had returned")
        for output in outputs:
            poison(output, self.protected)
        del outputs
        yield from self._plain_calls(turn)

    def _plain_calls(self, turn: int) -> Iterator[Held]:
        """Plain calls, each one's answer copied the moment it returns, as the host loop made."""
        copies: list[tuple[torch.Tensor, ...]] = []
        first: Result | None = None
        for i in range(self.calls):
            output = self.rig.call(i)
            copies.append(_copy(output))
            if i == 0:
                first = output
                continue
            poison(output, self.protected)
            del output
        self.rig.wait()
        assert first is not None
        singles: list[Result] = [c[0] if isinstance(first, torch.Tensor) else c for c in copies]
        yield Held("plain", singles)
        _all_written("plain", singles)
        if turn == 0 and self._changed(copies[:1], [first]):
            raise Caught("the output changed after the call had returned")

    def _changed(self, then: Sequence[Result], now: Sequence[Result]) -> bool:
        """Whether answers became others while nobody called."""
        time.sleep(SETTLE)
        self.rig.wait()
        pairs = zip(then, now, strict=True)
        return not all(same_bits(a, b) for a, b in pairs)


def _copy(result: Result) -> tuple[torch.Tensor, ...]:
    copied = tuple(t.clone() for t in tensors_of(result))
    return Leading(copied) if isinstance(result, Leading) else copied


def _apart(outputs: Sequence[Result]) -> None:
    if shares_memory(outputs):
        raise Caught("two timed calls returned the same memory: one overwrites the other's answer")


def _all_written(label: str, outputs: Sequence[Result]) -> None:
    for i, output in enumerate(outputs):
        if unwritten(output):
            raise Caught(f"{label} call {i + 1} of {len(outputs)} left its output unwritten")
