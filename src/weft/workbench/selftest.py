"""The selftest: kernels that must not pass, and honest ones that must, judged as strangers are.

Each mutant goes through a judge's steps until one kills it, each honest control through all of
them. Checks run beside each other; the clock runs alone, after all the rest. A mutant that survives
is a bug in Weft, and so is a control that does not.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weft.core import WeftError
from weft.core.operator import unknown_name
from weft.workbench import kinds, mutants
from weft.workbench.mutants.cheats_process import SHARED
from weft.workbench.mutants.mutant import Mutant
from weft.workbench.selftest_judge import (
    KILLED,
    NOT_RUN,
    SURVIVED,
    Judged,
    Setting,
    Subject,
    in_one_process,
    step,
    why_not,
)

# What can be left out besides the rules of the check and the checks of the clock.
HOUSE = {
    "seeds": "more than one seed a case",
    "backward": "the gradients",
    "process": "the reference in another process than the candidate",
    "channel": "the private channel: what is printed is believed",
    "provenance": "whose kernels ran",
    "observed": "the kernels with a profiler and without, compared",
}
Say = Callable[[Judged, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a selftest came to. ``planted`` counts the mutants that ran, ``controls`` likewise."""

    judged: tuple[Judged, ...]
    planted: tuple[Mutant, ...]

    def _of(self, honest: bool) -> list[tuple[Mutant, Judged]]:
        both = zip(self.planted, self.judged, strict=True)
        return [(m, j) for m, j in both if m.honest == honest and j.status != NOT_RUN]

    @property
    def good(self) -> bool:
        """Whether something ran, all mutants that ran were killed, and all controls passed."""
        said = self.to_json()
        ran = said["planted"] + said["controls"]
        return bool(ran) and not said["survivors"] and said["controls_passed"] == said["controls"]

    def to_json(self) -> dict[str, Any]:
        """The contract: what was planted and killed, and what was not run, with the reason."""
        wrong, honest = self._of(False), self._of(True)
        killed = [(m, j) for m, j in wrong if j.status == KILLED]
        return {
            "planted": len(wrong),
            "killed": len(killed),
            "survivors": [m.id for m, j in wrong if j.status != KILLED],
            "not_run": [
                {"id": j.id, "reason": j.reason} for j in self.judged if j.status == NOT_RUN
            ],
            "controls": len(honest),
            "controls_passed": sum(j.status == SURVIVED for _, j in honest),
            "by_check": dict(Counter(j.check for _, j in killed).most_common()),
            "by_operator": {
                name: {
                    "planted": sum(m.operator == name for m, _ in wrong),
                    "killed": sum(m.operator == name for m, _ in killed),
                }
                for name in dict.fromkeys(m.operator for m, _ in wrong)
            },
            "unexpected": [
                {"id": m.id, "killed_by": j.check, "meant": list(m.killed_by), "reason": j.reason}
                for m, j in killed
                if j.check not in m.killed_by
            ],
            "false_alarms": [
                {"id": m.id, "check": j.check, "reason": j.reason}
                for m, j in honest
                if j.status == KILLED
            ],
        }


def left_out() -> dict[str, str]:
    """All that ``without`` may name, and what each is."""
    from weft.workbench.check import ACROSS
    from weft.workbench.check_rules import RULES
    from weft.workbench.plan import CHECKS

    rules = dict.fromkeys((*RULES, *ACROSS), "a rule of the check")
    clock = dict.fromkeys(CHECKS, "a check of the clock")
    return {**rules, **clock, **kinds.KINDS, **HOUSE}


def select(
    operators: Collection[str] = (), rows: Collection[str] = (), ids: Collection[str] = ()
) -> list[Mutant]:
    """The mutants and controls of these operators, rows and ids; of all where none are named.

    Raises :class:`WeftError` for a name that none of them has.
    """
    every = mutants.catalogue()
    for what, named, known in (
        ("operator with mutants", operators, [m.operator for m in every]),
        ("row", rows, [m.row for m in every]),
        ("mutant", ids, [m.id for m in every]),
    ):
        for name in named:
            if name not in known:
                raise unknown_name(what, name, list(dict.fromkeys(known)))
    return [
        m
        for m in every
        if (not operators or m.operator in operators)
        and (not rows or m.row in rows)
        and (not ids or m.id in ids)
    ]


def steps_of(mutant: Mutant, without: Collection[str]) -> tuple[str, ...]:
    """The judge's steps, in the order that kills soonest. A control goes through all of them."""
    if mutant.phase == "check" and not mutant.honest:
        return ("check",)
    return ("kernels", "clock", "check")


def run(
    planted: Sequence[Mutant],
    device: str,
    *,
    without: Collection[str] = (),
    jobs: int = 2,
    on_done: Say | None = None,
) -> Summary:
    """Judge these on ``device``; ``without`` leaves checks or kinds of cases out (left_out()).

    ``jobs`` are judged beside each other, but for the clock. ``on_done`` hears of each that is
    through, with how many are and how many there are. Raises :class:`WeftError` for a name in
    ``without`` that nothing has.
    """
    for name in without:
        if name not in left_out():
            raise unknown_name("check", name, list(left_out()))
    if jobs < 1:
        raise WeftError("--jobs", expected="at least 1", got=jobs)
    trial = _Trial(Setting.of(device, without), jobs, len(planted), on_done)
    with _shared_folder():
        waiting = list(trial.able(planted))
        if "process" in without:
            trial.beside(waiting, in_one_process)
        else:
            trial.all_steps(waiting)
    return Summary(judged=tuple(trial.found[m.id] for m in planted), planted=tuple(planted))


class _Trial:
    """The judging of many, step by step."""

    def __init__(self, setting: Setting, jobs: int, total: int, on_done: Say | None) -> None:
        self.setting, self.jobs, self.total, self.on_done = setting, jobs, total, on_done
        self.found: dict[str, Judged] = {}

    def able(self, planted: Iterable[Mutant]) -> Iterator[Mutant]:
        """Those that can run here; the others are done, with their reason."""
        for mutant in planted:
            reason = why_not(mutant, self.setting.device)
            if reason:
                self._done(Judged(id=mutant.id, status=NOT_RUN, reason=reason))
            else:
                yield mutant

    def all_steps(self, waiting: Sequence[Mutant]) -> None:
        by_check = [m for m in waiting if steps_of(m, self.setting.without) == ("check",)]
        others = [m for m in waiting if m not in by_check]
        self.beside(by_check, partial(self._step, "check"))
        others = self.beside(others, partial(self._step, "kernels"), last=False)
        others = [m for m in others if not self._clock(m)]
        self.beside(others, partial(self._step, "check"))

    def _step(self, name: str, mutant: Mutant, setting: Setting) -> Judged:
        return step(name, Subject.of(mutant), setting)

    def _clock(self, mutant: Mutant) -> bool:
        """Whether the clock, alone on the machine, killed it."""
        found = self._step("clock", mutant, self.setting)
        if found.status == KILLED:
            self._done(found)
        return found.status == KILLED

    def beside(
        self,
        waiting: Sequence[Mutant],
        judge: Callable[[Mutant, Setting], Judged],
        *,
        last: bool = True,
    ) -> list[Mutant]:
        """Judge several at once; those that are left where this was not their ``last`` step."""
        left = []
        with ThreadPoolExecutor(self.jobs, thread_name_prefix="selftest") as pool:
            asked = {pool.submit(judge, m, self.setting): m for m in waiting}
            for one in as_completed(asked):
                found = one.result()
                if found.status == KILLED or last:
                    self._done(found)
                else:
                    left.append(asked[one])
        return [m for m in waiting if m in left]

    def _done(self, found: Judged) -> None:
        self.found[found.id] = found
        if self.on_done is not None:
            self.on_done(found, len(self.found), self.total)


@contextmanager
def _shared_folder() -> Iterator[None]:
    """A folder that all the candidates' processes can find, for the cheats that need one."""
    memory = Path("/dev/shm")
    before = os.environ.get(SHARED)
    with tempfile.TemporaryDirectory(
        prefix="weft-selftest-", dir=memory if memory.is_dir() else None
    ) as folder:
        os.environ[SHARED] = folder
        try:
            yield
        finally:
            os.environ.pop(SHARED)
            if before is not None:
                os.environ[SHARED] = before
