"""What is profiled: an implementation that passed its check, on inputs as the clock draws them.

A step calls it once on each of a set of distinct inputs, which together outgrow the last-level
cache twice where there is room for them, and waits until the device is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from weft import backends
from weft.core import BACKWARD, Case, Implementation, Operator, Verdict, WeftError, registry
from weft.core.operator import DIRECTIONS, unknown_name
from weft.core.record import PASS
from weft.workbench.bench import CHECK_SEEDS, synchronise
from weft.workbench.bind import bind
from weft.workbench.check import check
from weft.workbench.oracle import Oracle, fresh_seeds
from weft.workbench.plan import MOST_CALLS, Candidate, Stand
from weft.workbench.slots import Form, Result, Slot, deal

USUAL = "torch"  # the vendor's own fused call, which every operator has
SHORTEST = (
    5_000.0  # us that a step lasts where calls allow, so that what lies between steps is small
)
LONGEST = 200_000.0  # us that a step is let last where fewer inputs than the cache asks for do it
FEW = 8  # inputs where even the most that are drawn would not outgrow the cache


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One implementation at one case, in one direction, on one device ('cuda' or 'cpu')."""

    operator: Operator
    implementation: Implementation
    case: Case
    direction: str
    device: str

    def bind(self, slot: Slot) -> Callable[[], Result]:
        one = (self.operator, self.implementation, self.case, self.direction)
        return bind(*one, slot.inputs, slot.grad)


def subject(
    operator: str, implementation: str | None, case: str | None, direction: str, device: str
) -> Subject:
    """What these names mean: by default the vendor's call, at the first bench case of the device.

    Raises :class:`WeftError` for a name that there is not, and for what cannot be timed here.
    """
    if direction not in DIRECTIONS:
        raise unknown_name("direction", direction, list(DIRECTIONS))
    found = registry.operator(operator)
    name = implementation or USUAL
    known = registry.implementation_names(operator)
    if name not in known:
        raise unknown_name(f"implementation of {operator}", name, known)
    one = registry.implementation(operator, name)
    at = found.case(case) if case else next(iter(found.select("bench", device)), found.cases[0])
    if not found.cost(at, direction).written:
        raise WeftError(
            f"{operator} {at.name} {direction} moves nothing: there is nothing to profile",
            hint="the gradient is a view; try --direction forward",
        )
    answer = backends.support(one, at, device, direction)
    if not (answer.ok and answer.timed):
        raise WeftError(
            f"{operator} {name} {at.name} cannot be profiled here",
            expected=f"what can be timed on this {device} device",
            got=answer.reason,
        )
    return Subject(operator=found, implementation=one, case=at, direction=direction, device=device)


def checked(one: Subject) -> tuple[Verdict, Form | None]:
    """The verdict on a subject, as bench asks for it, and the form of the gradient it is given."""
    oracle = Oracle(one.operator, one.case, one.direction, one.device, fresh_seeds(CHECK_SEEDS))
    verdict = check(
        one.operator, one.implementation, one.case, one.direction, one.device, oracle=oracle
    )
    if verdict.status != PASS or one.direction != BACKWARD:
        return verdict, None
    form = oracle.grad_form
    return verdict, (form.shape, form.dtype)


class Work:
    """A subject bound to its inputs. ``calls`` is how many a step makes, ``inputs`` how many
    distinct ones they rotate over; ``cold`` says that those outgrow the cache twice."""

    def __init__(self, device: str, closures: Sequence[Callable[[], Result]], rounds: int) -> None:
        self.device, self.cold = device, False
        self._closures = list(closures) * rounds
        self.inputs = len(closures)
        # An output lives until its input's next call, so that outputs rotate through memory too.
        self._outputs: list[Result | None] = [None] * self.inputs

    @property
    def calls(self) -> int:
        return len(self._closures)

    def enqueue(self) -> None:
        """A step's calls; on a GPU it may return before they are done."""
        outputs, inputs = self._outputs, self.inputs
        for i, call in enumerate(self._closures):
            outputs[i % inputs] = call()

    def step(self) -> None:
        self.enqueue()
        synchronise(self.device)


def prepare(one: Subject, grad: Form | None, stand: Stand) -> Work:
    """Draw as many inputs as outgrow the cache and make a step of them; bound and called once.

    Called within the stand's context: a backward runs on the stream that its forward ran on.
    """
    make = partial(deal, one.case, one.device, grad)
    first = replace(make(0), seed=0)
    found = stand.estimate(Candidate(name=one.implementation.name, bind=one.bind), first)
    each = max(1, first.nbytes + found.output_bytes)
    inputs, rounds = shape(each, found.us, stand.cache, stand.memory() // 2)
    slots = [first, *(make(seed) for seed in range(1, inputs))]
    work = Work(one.device, [one.bind(slot) for slot in slots], rounds)
    work.cold = inputs * each >= 2 * stand.cache
    work.step()
    return work


def shape(each: int, us: float, cache: int, room: int) -> tuple[int, int]:
    """How many distinct inputs of ``each`` bytes a step of calls of ``us`` rotates over, and how
    often; ``cache`` and ``room`` in bytes.

    >>> shape(1 << 20, 100.0, 8 << 20, 1 << 30), shape(64, 2.0, 8 << 20, 1 << 30)
    ((16, 4), (8, 32))
    """
    us = max(us, 0.1)
    wanted = max(1, -(-2 * cache // each))
    inputs = wanted if wanted <= MOST_CALLS else FEW
    inputs = max(1, min(inputs, room // each, max(2, int(LONGEST // us))))
    rounds = -(-SHORTEST // (inputs * us))
    return inputs, int(max(1, min(rounds, MOST_CALLS // inputs)))
