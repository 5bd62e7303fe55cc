"""Judge a mutant that is a problem in another suite's format, with all steps of ``weft judge``."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from weft.workbench.judge.judge import JudgeOptions, judge
from weft.workbench.judge.judgement import NOT_RUN as JUDGE_NOT_RUN
from weft.workbench.judge.judgement import Judgement
from weft.workbench.selftest.judge import (
    BUSY,
    INCONCLUSIVE,
    LIMITS,
    NOT_RUN,
    TIME_CHECKS,
    MutantResult,
    SelftestSettings,
)
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.timing.plan import timing_check_of

REFERENCE, CANDIDATE, TASK = "reference.py", "candidate.py", "task.yml"


def judge_problem(mutant: Mutant, settings: SelftestSettings) -> MutantResult:
    """Judge the files of a mutant with a ``problem``; one at a time, whatever the number of jobs."""
    start, files = time.monotonic(), mutant.problem
    assert files is not None
    texts = {REFERENCE: files.reference, CANDIDATE: files.candidate, TASK: files.task}
    options = JudgeOptions(device=settings.device, time=files.timed, limits=LIMITS, without=settings.without)
    with tempfile.TemporaryDirectory(prefix="weft-selftest-") as name:
        folder = Path(name) / mutant.operator  # the problem's name
        folder.mkdir()
        for file, text in texts.items():
            if text:
                (folder / file).write_text(text)
        # A problem's generators are seeded globally: in two threads at once they would draw other values.
        with settings.problem_lock:
            judgement = judge(folder / REFERENCE, folder / CANDIDATE, options)
    result = _result(mutant, judgement, settings)
    return replace(result, seconds=time.monotonic() - start)


def _result(mutant: Mutant, judgement: Judgement, settings: SelftestSettings) -> MutantResult:
    result = MutantResult(id=mutant.id)
    check, _, detail = judgement.reason.partition(": ")
    if check == JUDGE_NOT_RUN:
        return replace(result, status=NOT_RUN, reason=detail)
    if not judgement.correct:
        return result.killed(timing_check_of(detail) or check, judgement.reason)
    if mutant.honest and judgement.own is not None and judgement.own.passed is False:
        return result.killed("own", judgement.own.detail)
    untimed = next((flag for flag in judgement.flags if flag.startswith("not timed")), "")
    if mutant.problem is not None and mutant.problem.timed and untimed and "timed" not in settings.without:
        return result.killed("timed", untimed)
    doubtful = next((note for note in judgement.notes if BUSY in note), "")
    if doubtful and (mutant.honest or set(mutant.killed_by) <= TIME_CHECKS):
        return replace(result, status=INCONCLUSIVE, reason=doubtful)
    return result
