"""The clock's part that a guest does: make rigs, take samples, refill, run again, hand answers out.

The judge keeps the race, the oracle and a clock of its own (``remote_clock.py``); it sends seeds
and gets numbers, and of the answers those that it picks once they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from weft.core import BACKWARD, Case, Implementation, Operator
from weft.workbench.bind import bind
from weft.workbench.clock import stand_for
from weft.workbench.guard import Threads, remember, replaced
from weft.workbench.local_rig import Contents, LocalRig
from weft.workbench.plan import Answers, Candidate, Caught, Plan, Stand
from weft.workbench.slots import Form, deal, tensors_of

Said = dict[str, Any]
Answer = tuple[dict[str, Any], Sequence[torch.Tensor]]
Verb = Callable[[Said, list[torch.Tensor]], Answer]


class Loaded(Protocol):
    """What a guest has read: ``point`` says what a request means here."""

    def point(self, said: Mapping[str, Any]) -> tuple[Operator, Implementation, Case, str, str]: ...


@dataclass(kw_only=True)
class Timed:
    """One candidate at one point: its stand, and what was made ready of it."""

    stand: Stand
    candidate: Candidate
    contents: Contents
    rig: LocalRig | None = None
    passes: Iterator[Answers] | None = None
    answers: Answers | None = None
    newcomers: set[str] = field(default_factory=set)

    @property
    def ready(self) -> LocalRig:
        assert self.rig is not None, "clock.rig comes before"
        return self.rig


class Clock:
    """The timings that stand in a guest, by number."""

    def __init__(self, state: Loaded) -> None:
        self.state = state
        self.threads = Threads()
        self.timed: dict[int, Timed] = {}
        self.made = 0

    def verbs(self) -> dict[str, Verb]:
        steps = {
            "sample": _sample,
            "side": _side,
            "cross": _cross,
            "repeat": _repeat,
            "audit": _audit,
            "rerun": _rerun,
            "pick": _pick,
            "estimate": _estimate,
            "rig": _rig,
            "memory": _memory,
        }
        own: dict[str, Verb] = {f"clock.{n}": partial(self._step, s) for n, s in steps.items()}
        return own | {
            "clock.first": self._first,
            "clock.stand": self._stand,
            "clock.replaced": lambda said, _: ({"replaced": replaced()}, ()),
            "clock.nothing": lambda said, _: ({}, ()),
        }

    def _step(self, step: Step, said: Said, _: list[torch.Tensor]) -> Answer:
        """One verb on one timing, on the stand's own stream; who outlived it is told."""
        timed = self.timed[said["timed"]]
        with timed.stand.context():
            told, tensors = step(timed, said)
        timed.newcomers |= self.threads.newcomers()
        flags = sorted(timed.rig.flags) if timed.rig else []
        return {**told, "flags": flags, "threads": sorted(timed.newcomers)}, tensors

    def _first(self, said: Said, _: list[torch.Tensor]) -> Answer:
        """Bind and call for the first time; the judge has the watch."""
        operator, implementation, case, direction, device = self.state.point(said)
        slot = deal(case, device, _grad_form(said, direction), said["seed"])
        bind(operator, implementation, case, direction, slot.inputs, slot.grad)()
        if device == "cuda":
            torch.cuda.synchronize()
        return {}, ()

    def _stand(self, said: Said, _: list[torch.Tensor]) -> Answer:
        operator, implementation, case, direction, device = self.state.point(said)
        stand = stand_for(device, said["without"])
        made = Timed(
            stand=stand,
            candidate=Candidate(
                name=implementation.name,
                bind=lambda slot: bind(
                    operator, implementation, case, direction, slot.inputs, slot.grad
                ),
            ),
            contents=Contents(partial(deal, case, device, _grad_form(said, direction))),
        )
        self.made += 1
        self.timed[self.made] = made
        told = {"cache": stand.cache, "overhead": stand.overhead, "slow": stand.slow}
        return {"timed": self.made, **told}, ()


Step = Callable[[Timed, Said], Answer]


def _grad_form(said: Said, direction: str) -> Form | None:
    if direction != BACKWARD:
        return None
    shape, dtype = said["grad"]
    return tuple(shape), getattr(torch, dtype)


def _memory(timed: Timed, said: Said) -> Answer:
    return {"bytes": timed.stand.memory()}, ()


def _estimate(timed: Timed, said: Said) -> Answer:
    found = timed.stand.estimate(timed.candidate, timed.contents.make_slot(said["seed"]))
    return {"us": found.us, "output_bytes": found.output_bytes}, ()


def _rig(timed: Timed, said: Said) -> Answer:
    timed.rig = timed.passes = timed.answers = None  # the old one goes before the new one comes
    slots = [timed.contents.make_slot(seed) for seed in said["seeds"]]
    plan = Plan(calls=said["calls"], flush=said["flush"])
    made = timed.stand.entrant(timed.candidate, slots, timed.contents, plan)
    assert isinstance(made, LocalRig)
    timed.rig = made
    return {"calls": made.calls}, ()


def _sample(timed: Timed, said: Said) -> Answer:
    return {"us": timed.ready.sample(), "audited": timed.ready.audited}, ()


def _side(timed: Timed, said: Said) -> Answer:
    """One sample of ``warm`` or of ``host``."""
    rig = timed.ready
    return {"us": rig.warm() if said["warm"] else rig.host()}, ()


def _cross(timed: Timed, said: Said) -> Answer:
    return {"told": timed.ready.cross_check()}, ()


def _repeat(timed: Timed, said: Said) -> Answer:
    return {"us": timed.ready.rig.repeat(said["repeats"], said["warm"])}, ()


def _audit(timed: Timed, said: Said) -> Answer:
    """A time on contents never seen; without seeds, on the same again."""
    if not said["seeds"]:
        return {"us": timed.ready.audited_again(said["calls"])}, ()
    try:
        us, timed.answers = timed.ready.audit(said["seeds"])
    except Caught as caught:
        return {"caught": str(caught)}, ()
    return {"us": us, "count": len(timed.answers)}, ()


def _rerun(timed: Timed, said: Said) -> Answer:
    """Begin to run again on these contents, or, with none, go on to what comes next."""
    if said["seeds"]:
        timed.passes = timed.ready.rerun(said["seeds"], said["turn"])
    assert timed.passes is not None, "a run again begins with seeds"
    timed.answers = None
    try:
        timed.answers = next(timed.passes, None)
    except Caught as caught:
        return {"caught": str(caught)}, ()
    if timed.answers is None:
        return {}, ()
    return {"label": timed.answers.label, "count": len(timed.answers)}, ()


def _pick(timed: Timed, said: Said) -> Answer:
    assert timed.answers is not None, "nothing has been run"
    found = timed.answers.pick(said["indexes"])
    tensors = [tensors_of(found[i]) for i in said["indexes"]]
    single = [isinstance(found[i], torch.Tensor) for i in said["indexes"]]
    sent = [t.detach().cpu() for group in tensors for t in group]
    return {"groups": [len(group) for group in tensors], "single": single}, sent


def verbs(state: Loaded) -> Mapping[str, Verb]:
    """What a guest answers about time; to be called before anything of a stranger's is read."""
    remember()
    return Clock(state).verbs()
