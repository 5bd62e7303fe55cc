"""The clock's words: candidate, budget, plan, outcome, and what a rig and a stand can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from weft.core import Timing
from weft.workbench.slots import MakeSlot, Result, Slot

# The clock's own checks, by the names that `without` takes, and how the flags and reasons of those
# that fail begin.
CHECKS: dict[str, tuple[str, ...]] = {
    "recheck": ("recheck:",),
    "fresh": ("suspect: slower on contents", "suspect: never timed on contents"),
    "clocks": ("suspect: clocks disagree", "suspect: side-stream"),
    "wall": ("suspect: the parent's clock disagrees",),
    "replaced": ("replaced:",),
    "samples": ("suspect: too few samples",),
    "threads": ("suspect: threads",),
    "cache": ("suspect: L2 set aside",),
}

SHORTEST = 50.0  # us that a sample must last
AIM = 200.0  # us that it is planned for
MOST_CALLS = 256
# How many times slower than at the samples a call may be a moment later, because of what else the
# machine does: with a steady headline, and at most.
BUSY = {"cuda": 1.25, "cpu": 2.0}
BUSIEST = 8.0
CROSS_TRIES = 3  # times that two clocks may disagree before it is called suspect
PATIENCE = 3.0  # times the seconds of a budget, for whoever has too few samples


class CannotTime(RuntimeError):
    """A candidate that can be checked but not timed; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What is timed: ``bind(slot)`` gives the closure that computes one call on a slot's inputs.

    ``first`` is the wall time (us) of the very first call in this process, which only the caller
    can have seen. A candidate that lives in another process has a ``stand`` of its own there, and
    its ``bind`` is never called here.
    """

    name: str
    bind: Callable[[Slot], Callable[[], Result]]
    first: float | None = None
    stand: Stand | None = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to measure one case in one direction, all candidates together.

    Sampling stops for a candidate when its interval is under ``width`` with at least ``minimum``
    samples; for all at ``seconds`` or ``maximum`` rounds, and the rest is flagged ``noisy``. Who
    has fewer than ``minimum`` samples by then is sampled on, up to ``PATIENCE`` times ``seconds``
    in all (a stranger: of its own time), so that wasting the time wins nothing. Once re-checking
    one candidate has taken ``recheck`` seconds, two turns are enough.
    """

    seconds: float = 20.0
    warmup: float = 1.0
    minimum: int = 20
    maximum: int = 400
    width: float = 0.005
    side_samples: int = 10
    recheck: float = 10.0

    @staticmethod
    def of(device: str, quick: bool = False) -> Budget:
        """The default of a device ('cuda' or 'cpu')."""
        if device == "cuda":
            return Budget(seconds=3.0, warmup=0.3) if quick else Budget()
        seconds, warmup = (0.5, 0.05) if quick else (1.2, 0.1)
        return Budget(seconds=seconds, warmup=warmup, maximum=200, side_samples=5, recheck=1.0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many calls one sample holds, and whether the cache is flushed before it.

    Without a flush the calls' inputs and outputs are together at least twice the cache, so that
    each call finds the cache as the call before it leaves it and nothing of its own.
    """

    calls: int
    flush: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What measuring one candidate came to.

    ``refusal``: its timed calls were wrong, so the verdict is fail. ``trouble``: it could not be
    timed (out of memory, raised), which says nothing of its answers.
    """

    timing: Timing | None = None
    refusal: str = ""
    trouble: str = ""


class Answers(Protocol):
    """What one pass over the slots returned, call by call; ``label`` says how they were made.

    Of calls made in another process only those that are picked travel.
    """

    @property
    def label(self) -> str: ...
    def __len__(self) -> int: ...
    def pick(self, indexes: Sequence[int]) -> Mapping[int, Result]: ...


class Sampled(Protocol):
    """A candidate made ready on its slots, be it here or far away. Times are in us a call.

    ``cross_check`` holds two clocks, or more, against each other; ``cold`` is the headline, and
    ``busy`` how many times that a call may honestly take by now.
    """

    plan: Plan
    flags: set[str]

    @property
    def calls(self) -> int: ...
    @property
    def audited(self) -> int: ...
    def sample(self) -> float: ...
    def warm(self) -> float: ...
    def host(self) -> float: ...
    def cross_check(self, cold: float = 0.0, busy: float = 1.0) -> list[str]: ...


class Rig(Sampled, Protocol):
    """One that was made in this process, by what only this process can ask of it."""

    def repeat(self, repeats: int, warm: bool) -> float: ...
    def once(self, calls: int) -> tuple[float | None, list[Result]]: ...
    def replay(self) -> list[Result]: ...
    def call(self, index: int) -> Result: ...
    def wait(self) -> None: ...


class Entrant(Sampled, Protocol):
    """One as the race sees it, which can be given other contents.

    ``audit`` gives each of the first slots the contents of one of ``seeds``, never seen before, and
    times their calls once, from a clean cache; None where the sample was spoilt;
    ``audited_again`` times as many of them on what they now hold. ``rerun`` gives
    all slots contents of these few seeds in turns, and yields what the timed calls returned, then
    what plain calls did; it raises :class:`Caught` for what can only be seen where they ran.
    ``near`` says whether answers are at hand, so that every one of them may be looked at.
    """

    near: bool

    def audit(self, seeds: Sequence[int]) -> tuple[float | None, Answers]: ...
    def audited_again(self, calls: int) -> float | None: ...
    def rerun(self, seeds: Sequence[int], turn: int) -> Iterator[Answers]: ...
    def replaced(self) -> list[str]: ...


class Caught(Exception):
    """A candidate was caught at its own memory; the message says how."""


class Stand(Protocol):
    """Where rigs are made: one device, of this process or of another."""

    cache: int
    overhead: float
    slow: float

    def context(self) -> AbstractContextManager[None]: ...
    def memory(self) -> int: ...
    def estimate(self, candidate: Candidate, slot: Slot) -> Estimate: ...
    def entrant(
        self, candidate: Candidate, slots: Sequence[Slot], contents: MakeSlot, plan: Plan
    ) -> Entrant: ...


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The least time (us) of a few calls, and the bytes that one call returns."""

    us: float
    output_bytes: int


def check_of(told: str) -> str:
    """The check that a flag or a refusal of the clock comes from; '' for any other flag.

    >>> check_of("suspect: slower on contents it had not seen: 9 us against 1 us")
    'fresh'
    """
    return next((name for name, begins in CHECKS.items() if told.startswith(begins)), "")


def plan(footprint: int, cache: int, call_us: float, *, slow_us: float, fits: int) -> Plan:
    """How to sample a call of ``call_us`` that touches ``footprint`` bytes.

    Rotation over distinct slots where ``fits`` of them suffice for twice the ``cache`` and a
    sample does not last over ``slow_us`` (two calls may); else fewer calls and a flush before.
    """
    rotate = max(2, -(-2 * cache // max(1, footprint)))
    want = max(1, int(-(-AIM // max(call_us, 0.1))))
    most = max(1, min(MOST_CALLS, fits))
    if rotate <= most and max(rotate - 1, 1) * call_us <= slow_us:
        return Plan(calls=min(max(rotate, want), most), flush=False)
    return Plan(calls=min(want, most), flush=True)
