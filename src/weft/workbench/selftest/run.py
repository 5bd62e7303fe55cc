"""Selftest: judge kernels that must fail and honest kernels that must pass.

Each mutant goes through the judge's steps until one kills it, each honest control through all of
them. Checks run in parallel; timing runs alone, after all the rest. A surviving mutant is a bug in
Weft, and so is a refused control.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weft.core import WeftError
from weft.core.operator import unknown_name
from weft.workbench.calls.case_kinds import KINDS
from weft.workbench.check.check import ACROSS
from weft.workbench.check.rules import RULES
from weft.workbench.sandbox.process import end_workers
from weft.workbench.selftest import mutants
from weft.workbench.selftest.judge import (
    INCONCLUSIVE,
    KILLED,
    NOT_RUN,
    SURVIVED,
    MutantResult,
    SelftestSettings,
    Subject,
    judge_in_one_process,
    run_step,
    why_not_run,
)
from weft.workbench.selftest.mutants.cheats_process import SHARED
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.problems import judge_problem
from weft.workbench.selftest.remaining import RemainingTime
from weft.workbench.timing.plan import CHECKS

# Parts of judging that can be left out, besides the rules of the check and the timing's checks.
JUDGE_PARTS = {
    "seeds": "more than one seed a case",
    "many": "up to 250 calls of a quick case",
    "backward": "the gradients",
    "process": "the reference in another process than the candidate",
    "channel": "the private channel: what is printed is believed",
    "provenance": "whose kernels ran",
    "observed": "the kernels with a profiler and without, compared",
    "weights": "other values for the constant weights of a problem",
    "constants": "other values for a problem's inputs that never vary, and no time where there are none",
}
OnDone = Callable[[MutantResult, int, int], None]
END_PERIOD = 0.2  # seconds between two requests to end the workers of an interrupted run


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Result of a selftest: the planted mutants and controls, and one result for each."""

    results: tuple[MutantResult, ...]
    planted: tuple[Mutant, ...]

    def _that_ran(self, honest: bool) -> list[tuple[Mutant, MutantResult]]:
        pairs = zip(self.planted, self.results, strict=True)
        undecided = (NOT_RUN, INCONCLUSIVE)
        return [(m, r) for m, r in pairs if m.honest == honest and r.status not in undecided]

    @property
    def good(self) -> bool:
        """True if something ran, all mutants that ran were killed, and all controls passed.

        A mutant that only its time can show is inconclusive on a busy machine, and counts as not run.
        """
        report = self.to_json()
        n_run = report["planted"] + report["controls"]
        all_passed = report["controls_passed"] == report["controls"]
        return bool(n_run) and not report["survivors"] and all_passed

    def to_json(self) -> dict[str, Any]:
        """Return the contract: the planted and killed mutants, and those not run with the reason.

        ``planted`` counts the mutants that ran with a result, ``controls`` the controls that ran.
        ``inconclusive`` are the mutants whose time could not be trusted.
        """
        wrong, honest = self._that_ran(False), self._that_ran(True)
        killed = [(m, r) for m, r in wrong if r.status == KILLED]
        return {
            "planted": len(wrong),
            "killed": len(killed),
            "survivors": [m.id for m, r in wrong if r.status != KILLED],
            "not_run": [{"id": r.id, "reason": r.reason} for r in self.results if r.status == NOT_RUN],
            "controls": len(honest),
            "controls_passed": sum(r.status == SURVIVED for _, r in honest),
            "by_check": dict(Counter(r.check for _, r in killed).most_common()),
            "by_operator": {
                name: {
                    "planted": sum(m.operator == name for m, _ in wrong),
                    "killed": sum(m.operator == name for m, _ in killed),
                }
                for name in dict.fromkeys(m.operator for m, _ in wrong)
            },
            "unexpected": [
                {"id": m.id, "killed_by": r.check, "meant": list(m.killed_by), "reason": r.reason}
                for m, r in killed
                if r.check not in m.killed_by
            ],
            "false_alarms": [
                {"id": m.id, "check": r.check, "reason": r.reason} for m, r in honest if r.status == KILLED
            ],
            "inconclusive": [
                {"id": r.id, "reason": r.reason} for r in self.results if r.status == INCONCLUSIVE
            ],
        }


def can_be_left_out() -> dict[str, str]:
    """Return all names that ``without`` accepts, with a description of each."""
    rules = dict.fromkeys((*RULES, *ACROSS), "a rule of the check")
    timing = dict.fromkeys(CHECKS, "a check of the timing")
    return {**rules, **timing, **KINDS, **JUDGE_PARTS}


def select(
    operators: Collection[str] = (), rows: Collection[str] = (), ids: Collection[str] = ()
) -> list[Mutant]:
    """Return the mutants and controls of these operators, rows and ids; all if none are named.

    Raises :class:`WeftError` for a name that none of them has, and if none has all that is named.
    """
    catalogue = mutants.catalogue()
    for what, names, known in (
        ("operator with mutants", operators, [m.operator for m in catalogue]),
        ("row", rows, [m.row for m in catalogue]),
        ("mutant", ids, [m.id for m in catalogue]),
    ):
        for name in names:
            if name not in known:
                raise unknown_name(what, name, list(dict.fromkeys(known)))
    chosen = [
        m
        for m in catalogue
        if (not operators or m.operator in operators)
        and (not rows or m.row in rows)
        and (not ids or m.id in ids)
    ]
    if not chosen:
        raise WeftError(
            "planted kernels of these operators, rows and ids",
            expected="at least one that is in all three selections",
            got=f"none for {', '.join((*operators, *rows, *ids))}",
            hint="leave one selection out, or run them one after the other",
        )
    return chosen


def shard(planted: Sequence[Mutant], part: str) -> list[Mutant]:
    """Return part I of N of the mutants (``I/N``, I from 0), in their order.

    Each part has as many of every kind as the others: a control takes a hundred times as long as most
    mutants, and timing runs alone.
    Raises :class:`WeftError` unless 0 <= I < N <= the number of mutants: other parts would be empty.
    """
    first, _, count = part.partition("/")
    valid = first.isdecimal() and count.isdecimal()
    if not (valid and int(first) < int(count) <= len(planted)):
        expected = f"I/N with I from 0 to N - 1 and N at most {len(planted)}, as in 0/2"
        raise WeftError("--shard", expected=expected, got=part)
    by_kind = sorted(planted, key=lambda m: (m.honest, steps_of(m), m.backend, m.row))
    ids = {m.id for m in by_kind[int(first) :: int(count)]}
    return [m for m in planted if m.id in ids]


def steps_of(mutant: Mutant) -> tuple[str, ...]:
    """Return the judge's steps, in the order that kills soonest. A control goes through all."""
    if mutant.problem is not None:  # judged in one piece; alone on the machine if it is timed
        return ("clock",) if mutant.problem.timed else ("check",)
    # A control must pass every step: a false alarm of any of them is a bug.
    if mutant.phase == "check" and not mutant.honest:
        return ("check",)
    return ("kernels", "clock", "check")


def remaining_time(planted: Iterable[Mutant], device: str, jobs: int = 2) -> RemainingTime:
    """Return the estimate of the seconds that :func:`run` will take, to which it adds what it measures."""
    remaining = RemainingTime(jobs=jobs)
    remaining.plan((m, steps_of(m)) for m in planted if not why_not_run(m, device))
    return remaining


def run(
    planted: Sequence[Mutant],
    device: str,
    *,
    without: Collection[str] = (),
    jobs: int = 2,
    on_done: OnDone | None = None,
    remaining: RemainingTime | None = None,
) -> Summary:
    """Judge mutants on ``device``; ``without`` leaves out checks or kinds of cases.

    ``jobs`` mutants are judged in parallel, except while timing. ``on_done`` receives each result
    with the number of results so far and of mutants, ``remaining`` the seconds of each step. An
    interrupt ends the worker processes.
    Raises :class:`WeftError` for a name in ``without`` that is not in :func:`can_be_left_out`.
    """
    for name in without:
        if name not in can_be_left_out():
            raise unknown_name("check", name, list(can_be_left_out()))
    if jobs < 1:
        raise WeftError("--jobs", expected="at least 1", got=jobs)
    selftest = _SelftestRun(SelftestSettings.create(device, without, jobs), jobs, len(planted), on_done)
    selftest.remaining = remaining or selftest.remaining
    with _shared_folder():
        waiting = list(selftest.runnable(planted))
        if "process" in without:
            selftest.run_parallel(waiting, selftest.judge_in_one_process)
        else:
            selftest.run_all_steps(waiting)
    return Summary(results=tuple(selftest.results[m.id] for m in planted), planted=tuple(planted))


class _SelftestRun:
    """Judging of many mutants, step by step."""

    def __init__(self, settings: SelftestSettings, jobs: int, total: int, on_done: OnDone | None) -> None:
        self.settings, self.jobs, self.total, self.on_done = settings, jobs, total, on_done
        self.results: dict[str, MutantResult] = {}
        self.inconclusive: dict[str, MutantResult] = {}
        self.remaining = RemainingTime()

    def runnable(self, planted: Iterable[Mutant]) -> Iterator[Mutant]:
        """Yield the mutants that can run here; store a result with the reason for the others."""
        for mutant in planted:
            reason = why_not_run(mutant, self.settings.device)
            if reason:
                self._store(MutantResult(id=mutant.id, status=NOT_RUN, reason=reason))
            else:
                yield mutant

    def run_all_steps(self, waiting: Sequence[Mutant]) -> None:
        # The cheap step first for those that it is meant to kill; the others are timed between their
        # two parallel steps, alone, since other work on the machine disturbs a clock.
        check_only = [m for m in waiting if steps_of(m) == ("check",)]
        others = [m for m in waiting if m not in check_only]
        self.run_parallel(check_only, partial(self._step, "check"))
        others = self.run_parallel(others, partial(self._step, "kernels"), is_last=False)
        others = [m for m in others if not self._is_killed_by_clock(m)]
        self.run_parallel(others, partial(self._step, "check"))

    def _step(self, name: str, mutant: Mutant, settings: SelftestSettings) -> MutantResult:
        if mutant.problem is not None and name not in steps_of(mutant):
            return MutantResult(id=mutant.id)
        if mutant.problem is not None:
            result = judge_problem(mutant, settings)
        else:
            result = run_step(name, Subject.of(mutant), settings)
        self.remaining.finish(name, mutant, result.seconds)
        return result

    def judge_in_one_process(self, mutant: Mutant, settings: SelftestSettings) -> MutantResult:
        result = judge_in_one_process(mutant, settings)
        for step in steps_of(mutant):
            self.remaining.finish(step, mutant, result.seconds)
        return result

    def _is_killed_by_clock(self, mutant: Mutant) -> bool:
        """Time the mutant alone on the machine; return True if that kills it."""
        result = self._step("clock", mutant, self.settings)
        if result.status == KILLED:
            self._store(result)
        if result.status == INCONCLUSIVE:
            self.inconclusive[mutant.id] = result
        return result.status == KILLED

    def run_parallel(
        self,
        waiting: Sequence[Mutant],
        judge: Callable[[Mutant, SelftestSettings], MutantResult],
        *,
        is_last: bool = True,
    ) -> list[Mutant]:
        """Judge several mutants at once; return the survivors of a step that is not their last."""
        survivors: list[Mutant] = []
        again: list[Mutant] = []  # short of memory beside other jobs
        # Threads are enough: the work is done in worker processes.
        with ThreadPoolExecutor(self.jobs, thread_name_prefix="selftest") as pool:
            futures = {pool.submit(judge, m, self.settings): m for m in waiting}
            try:
                for future in as_completed(futures):
                    result = future.result()
                    if result.shortage and self.jobs > 1:
                        again.append(futures[future])
                    elif result.status == KILLED or is_last:
                        self._store(result)
                    else:
                        survivors.append(futures[future])
            except BaseException:  # an interrupt above all: the pool would judge all that are waiting
                pool.shutdown(wait=False, cancel_futures=True)
                # A cancelled future counts as done here, and never for `wait` without an executor's notice.
                while running := [f for f in futures if not f.done()]:
                    end_workers()
                    wait(running, timeout=END_PERIOD)
                raise
        for mutant in again:
            result = judge(mutant, self.settings)
            if result.status == KILLED or is_last:
                self._store(result)
            else:
                survivors.append(mutant)
        # In the order of the catalogue; `survivors` has the order in which the judgements ended.
        return [m for m in waiting if m in survivors]

    def _store(self, result: MutantResult) -> None:
        if result.status == SURVIVED:
            # What survives the check as well could only have been shown by its time.
            result = self.inconclusive.get(result.id, result)
        self.results[result.id] = result
        if self.on_done is not None:
            self.on_done(result, len(self.results), self.total)


@contextmanager
def _shared_folder() -> Iterator[None]:
    """Create a folder that all workers can find, for the cheats that pass outputs between them."""
    # In memory: a cheat that passes outputs between processes must not be slowed by a disk, or the
    # clock would not be what catches it.
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
