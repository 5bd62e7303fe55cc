"""The selftest fails if the judge is weakened, and passes with the unmodified judge."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.by_chance import TRIES
from helpers.sample_records import GPU, record
from weft.cli import selftest as command
from weft.core import WeftError
from weft.workbench.calls.case_kinds import kinds
from weft.workbench.calls.memory import MemoryBudget
from weft.workbench.check import rules as check_rules
from weft.workbench.judge.judgement import Judgement
from weft.workbench.selftest import honest as selftest_honest
from weft.workbench.selftest import judge as selftest_judge
from weft.workbench.selftest import mutants
from weft.workbench.selftest import run as selftest
from weft.workbench.selftest.judge import INCONCLUSIVE, KILLED, NOT_RUN, SURVIVED, MutantResult
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.remaining import CONTROL_FACTOR, STEP_SECONDS, RemainingTime

CONTRACT = ["planted", "killed", "survivors", "not_run", "controls", "controls_passed", "by_check"]


def judge(*ids: str, without: tuple[str, ...] = ()) -> selftest.Summary:
    return selftest.run(selftest.select(ids=ids), "cpu", without=without)


def run(*arguments: str) -> Any:
    import typer

    app = typer.Typer()
    app.command()(command.selftest)
    return CliRunner().invoke(app, ["--device", "cpu", *arguments])


def _picked(*arguments: str) -> list[str]:
    return [a for one in arguments for a in ("--mutant", one)]


A_FEW = ("W02/softmax/eager/zeros", "C07/softmax/eager/lazy", "C12/softmax/eager/exit")
ONE_OFF = "W04/gelu/eager/one-element"
ON_GPU = "C05/softmax/eager/side-stream"


def test_an_unmodified_judge_kills_all_mutants() -> None:
    done = run("--json", *_picked(*A_FEW, ON_GPU))
    report = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert list(report)[: len(CONTRACT)] == CONTRACT
    assert (report["planted"], report["killed"], report["survivors"]) == (3, 3, [])
    assert report["by_check"] == {"error": 1, "type": 1, "channel": 1}
    assert report["not_run"] == [{"id": ON_GPU, "reason": mutants.find(ON_GPU).not_here}]
    assert report["unexpected"] == []


def test_the_output_lists_killed_mutants_and_those_not_run() -> None:
    done = run(*_picked(A_FEW[0], ON_GPU))
    assert done.exit_code == 0
    assert "killed 1 of 1 that ran" in done.stdout
    assert mutants.find(ON_GPU).not_here in done.stdout


@pytest.mark.pooled(2, "a damaged selftest")
def test_an_error_rule_that_always_passes_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check_rules.RULES, "error", lambda run: "")
    done = run(*_picked(ONE_OFF, A_FEW[1]))
    assert done.exit_code == 1
    assert f"survived: {ONE_OFF}" in done.stdout
    assert "killed 1 of 2 that ran" in done.stdout


@pytest.mark.pooled(2, "a damaged selftest")
def test_a_tolerance_that_is_far_too_wide_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    of = selftest_judge.Subject.of

    def lenient(mutant: Mutant) -> selftest_judge.Subject:
        subject = of(mutant)
        wide = replace(subject.operator.tolerance, c=1e9, ulps=1e9, reason="a test")
        return replace(subject, operator=replace(subject.operator, tolerance=wide, properties=()))

    monkeypatch.setattr(selftest_judge.Subject, "of", staticmethod(lenient))
    summary = judge(ONE_OFF)
    assert summary.to_json()["survivors"] == [ONE_OFF]
    assert not summary.good


@pytest.mark.pooled(2, "a damaged selftest")
def test_a_missing_rule_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not deleted: a key that comes back is the last one, and the order of the rules names the reason.
    monkeypatch.setitem(check_rules.RULES, "written", lambda call: "")
    summary = judge("W16/softmax/eager/nan-unwritten")
    assert summary.to_json()["survivors"] == ["W16/softmax/eager/nan-unwritten"]


@pytest.mark.pooled(2, "a damaged selftest")
def test_a_control_that_is_refused_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check_rules.RULES, "shape", lambda run: "no shape is good enough")
    summary = judge("H5/balance/eager/differences")
    report = summary.to_json()
    assert (report["controls"], report["controls_passed"]) == (1, 0)
    assert report["false_alarms"][0]["check"] == "shape"
    assert not summary.good


def test_every_suspicion_of_the_source_belongs_to_a_check() -> None:
    source = Path(selftest_judge.__file__).parents[2]
    literals = [
        (file.name, prefix)
        for file in source.rglob("*.py")
        if "selftest" not in file.parts
        for prefix in re.findall(r'"(suspect: [^"{]+)', file.read_text())
    ]
    assert len(literals) > 10
    for name, prefix in literals:
        assert selftest_judge.check_of_suspicion(prefix), name


def test_a_suspicion_that_no_check_makes_is_an_error() -> None:
    with pytest.raises(ValueError, match="no check is known"):
        selftest_judge.check_of_suspicion("suspect: kernel launched twice")


def test_a_library_kernel_is_told_from_a_difference_between_two_lists() -> None:
    flags = ["suspect: kernels: declared triton, but it ran aten::gelu", "suspect: faster than the floor"]
    suspect = replace(record(), flags=tuple(flags))
    assert [c for c, _ in selftest_judge.record_violations(suspect)] == ["provenance", "floor"]


def test_shards_have_every_mutant_once_and_as_many_of_each_kind() -> None:
    planted = mutants.catalogue()
    shards = [selftest.shard(planted, f"{i}/4") for i in range(4)]
    assert sorted(m.id for part in shards for m in part) == sorted(m.id for m in planted)
    for counts in (
        [sum(m.honest for m in part) for part in shards],
        [sum("clock" in selftest.steps_of(m) and not m.honest for m in part) for part in shards],
        [len(part) for part in shards],
    ):
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("part", ["", "1", "2/2", "-1/2", "a/b", "0/0", "0/4"])
def test_a_shard_that_would_be_empty_is_an_error(part: str) -> None:
    with pytest.raises(WeftError, match="--shard"):
        selftest.shard([mutants.find(i) for i in A_FEW], part)


def test_a_job_waits_until_its_memory_is_free() -> None:
    budget, order = MemoryBudget(10), []

    def work(name: str, nbytes: int, seconds: float) -> None:
        with budget.reserve(nbytes):
            order.append((name, budget.in_use))
            time.sleep(seconds)

    with ThreadPoolExecutor(3) as pool:
        with budget.reserve(6):
            jobs = [pool.submit(work, "large", 20, 0.0), pool.submit(work, "medium", 5, 0.0)]
            pool.submit(work, "small", 4, 0.0).result()
            assert order == [("small", 10)]
        for job in jobs:
            job.result()
    # More than the total runs, alone.
    assert sorted(order[1:]) == [("large", 20), ("medium", 5)] and budget.in_use == 0


def test_a_mutant_that_ran_out_of_memory_is_judged_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ("W02/softmax/eager/zeros", "W02/gelu/eager/zeros")
    running, seen = set(), []

    def step(name: str, subject: selftest_judge.Subject, settings: object) -> MutantResult:
        running.add(subject.mutant.id)
        time.sleep(0.05)
        others = len(running) - 1
        seen.append((subject.mutant.id, others))
        running.discard(subject.mutant.id)
        if len(seen) <= len(ids):
            return MutantResult(id=subject.mutant.id, status=NOT_RUN, reason="memory", shortage="memory")
        return MutantResult(id=subject.mutant.id, status=KILLED, check="error", reason="error: 1")

    monkeypatch.setattr(selftest, "run_step", step)
    summary = selftest.run(selftest.select(ids=ids), "cpu", jobs=2)
    assert [r.status for r in summary.results] == [KILLED, KILLED]
    assert sorted(seen[2:]) == sorted((i, 0) for i in ids)


@pytest.mark.parametrize("honest", [False, True])
def test_a_case_without_memory_is_no_verdict(honest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant that passed the rest may be wrong there; a control was judged at all that fits."""
    control = mutants.find("H1/softmax/eager/wrapped")
    killed_by = () if honest else ("error",)
    subject = selftest_judge.Subject.of(replace(control, honest=honest, killed_by=killed_by))
    cases = iter(subject.operator.select("check", "cpu")[:2])
    statuses = iter(["pass", "unsupported"])

    def verdict(*_: object, **__: object) -> Any:
        return SimpleNamespace(status=next(statuses), reason="out of memory: needed about 9 GiB, 1 GiB free")

    monkeypatch.setattr(selftest_judge, "cases_of", lambda *_: cases)
    monkeypatch.setattr(selftest_judge, "check", verdict)
    settings = selftest_judge.SelftestSettings.create("cpu", {"backward"})
    result = selftest_judge._check_all_cases(
        subject, control.make(), None, settings, MutantResult(id=control.id)
    )
    assert result.status == (SURVIVED if honest else NOT_RUN)
    assert result.shortage.startswith("out of memory: needed about 9 GiB, 1 GiB free (")


@pytest.mark.parametrize("operator", ["gelu", "matmul", "softmax", "sum"])
def test_one_control_of_an_operator_is_checked_at_its_huge_cases(operator: str) -> None:
    """All mutants keep them: a mutant may fail there alone."""
    checked = {}
    for mutant in mutants.catalogue():
        if mutant.operator == operator:
            subject = selftest_judge.Subject.of(mutant)
            cases = selftest_judge.cases_of(subject, "cuda", ())
            checked[mutant] = any("huge" in kinds(case, subject.operator) for case in cases)
    assert [m.row for m, is_huge in checked.items() if m.honest and is_huge] == ["H1"]
    assert all(is_huge for m, is_huge in checked.items() if not m.honest)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(WeftError, match="did you mean guards"):
        judge(A_FEW[0], without=("guard",))
    with pytest.raises(WeftError, match="unknown row"):
        selftest.select(rows=["W99"])
    with pytest.raises(WeftError, match="none for W30, H10/task/eager/honest"):
        selftest.select(rows=["W30"], ids=["H10/task/eager/honest"])


def test_a_mutant_killed_by_another_check_is_listed() -> None:
    mutant = mutants.find(A_FEW[0])
    by_another = MutantResult(id=mutant.id, status=KILLED, check="written", reason="written: 3 of 4")
    report = selftest.Summary(results=(by_another,), planted=(mutant,)).to_json()
    assert (report["planted"], report["killed"]) == (1, 1)
    assert report["unexpected"][0]["killed_by"] == "written"


BY_TIME = "C02/matmul/eager/whole"  # a cache by all contents, which only its time shows


@pytest.mark.parametrize("busy", ["", "load 7.1 on 2 cores"])
@pytest.mark.parametrize(
    "identity", [BY_TIME, "C02/softmax/eager/first-bytes", "H6/softmax/eager/from-cache"]
)
def test_on_a_busy_machine_a_time_is_not_trusted_and_values_are(
    identity: str, busy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A surviving kernel is a failure, unless only its time can show the fault on a busy machine."""
    here = {**GPU, "load": {"busy": busy}}
    monkeypatch.setattr(selftest_judge, "run", lambda *_, **__: iter([record(machine=here)]))

    def step(name: str, subject: Any, settings: Any) -> MutantResult:
        result = MutantResult(id=subject.mutant.id)
        if name != "clock":
            return result
        implementation = subject.mutant.make()
        return selftest_judge._time(subject, implementation, {}, settings, result)

    monkeypatch.setattr(selftest, "run_step", step)
    summary = judge(identity)
    (result,) = summary.results
    undecided = bool(busy) and identity == BY_TIME
    assert result.status == (INCONCLUSIVE if undecided else SURVIVED)
    report = summary.to_json()
    assert [m["id"] for m in report["inconclusive"]] == ([identity] if undecided else [])
    assert undecided == any("could not be trusted" in m["reason"] for m in report["inconclusive"])
    assert report["survivors"] == ([] if undecided or identity.startswith("H") else [identity])


@pytest.mark.parametrize(
    ("flag", "busy", "status"),
    [
        ("suspect: slower on contents it had not seen: 9 us", "load 7.1 on 2 cores", INCONCLUSIVE),
        ("suspect: slower on contents it had not seen: 9 us", "", KILLED),
        ("suspect: threads: one outlived its call", "load 7.1 on 2 cores", KILLED),
        ("suspect: the parent's clock disagrees (the worker's reading is off by 1 s)", "load 7", KILLED),
    ],
)
def test_load_explains_suspicions_by_time_alone(
    flag: str, busy: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = record(machine={**GPU, "load": {"busy": busy}}, flags=(flag,), implementation="it")
    monkeypatch.setattr(selftest_judge, "run", lambda *_, **__: iter([timed]))
    mutant = mutants.find("H6/softmax/eager/from-cache")
    subject, settings = selftest_judge.Subject.of(mutant), selftest_judge.SelftestSettings.create("cpu", ())
    result = selftest_judge._time(subject, mutant.make(), {}, settings, MutantResult(id=mutant.id))
    assert result.status == status

    judgement = Judgement(format="", operator="softmax", direction="forward", backend="eager", correct=True)
    judgement.add_records([timed, record(implementation="eager")], "it")
    assert judgement.correct == (status == INCONCLUSIVE)
    assert judgement.speedup is None or not judgement.correct
    assert any("could not be trusted" in note for note in judgement.notes) == judgement.correct


def test_a_selftest_without_results_does_not_pass() -> None:
    mutant = mutants.find(ON_GPU)
    none = MutantResult(id=mutant.id, status=NOT_RUN, reason="no GPU")
    assert not selftest.Summary(results=(none,), planted=(mutant,)).good
    alive = MutantResult(id=mutant.id, status=SURVIVED)
    assert not selftest.Summary(results=(alive,), planted=(mutant,)).good


def test_save_writes_what_json_prints(tmp_path: Path) -> None:
    file = tmp_path / "selftest.json"
    done = run("--json", "--save", str(file), *_picked(A_FEW[1]))
    assert json.loads(file.read_text()) == json.loads(done.stdout)


def test_the_list_runs_nothing() -> None:
    done = run("--list", "--row", "C01", "--operator", "gelu")
    assert done.exit_code == 0
    assert done.stdout.count("C01/gelu/eager/") == 3


@pytest.mark.slow
def test_an_honest_run_raises_no_alarm() -> None:
    summary = selftest_honest.run(1, "cpu")
    assert summary.runs == 1 and summary.verdicts > 50
    assert summary.alarms == ()


ONLY = {m.only: m for m in reversed(mutants.catalogue()) if m.only and "cpu" in m.devices}
# This mutant sleeps through its budget, twice; test_remote_timing tests the same check quickly.
SLEEPS = "samples"
# Comparisons of times on a real clock may speak for or against a kernel by chance, so that a judgement is
# repeated (:mod:`helpers.by_chance`).
COMPARES_TIMES = selftest_judge.TIME_CHECKS | {"wall"}


def _is_timed(name: str) -> bool:
    """True if only a timing shows the mutant of this check."""
    return "clock" in selftest.steps_of(ONLY[name])


def _group(name: str) -> str:
    """Return the group of a check: one of those by a timing, which takes half a minute, and of each third of
    the others runs."""
    others = [n for n in sorted(ONLY) if not _is_timed(n)]
    return "timed" if name not in others else f"third {others.index(name) % 3}"


def _by_check() -> Iterator[Any]:
    for name in sorted(ONLY):
        marks = [pytest.mark.alone] if _is_timed(name) else []
        marks += [pytest.mark.exhaustive] if name == SLEEPS else []
        yield pytest.param(name, id=name, marks=marks)


@pytest.mark.slow
@pytest.mark.sampled(1, each=_group)  # test_mutants_wrong.py has each rule in each run
@pytest.mark.parametrize("name", list(_by_check()))
def test_each_check_kills_a_mutant_that_no_other_kills(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = ONLY[name]
    if "clock" in selftest.steps_of(mutant):  # right at every case: a few will do
        every = selftest_judge.cases_of
        monkeypatch.setattr(selftest_judge, "cases_of", lambda *a: islice(every(*a), 5))
    for _ in range(TRIES if name in COMPARES_TIMES else 1):
        summary = judge(mutant.id)
        if summary.good:
            break
    if summary.results[0].status in (NOT_RUN, INCONCLUSIVE):  # the second: other work is on the machine
        pytest.skip(summary.results[0].reason)
    assert summary.good, summary.to_json()
    for _ in range(TRIES):
        summary = judge(mutant.id, without=(name,))
        if summary.results[0].check not in COMPARES_TIMES - {name}:
            break
    if summary.results[0].status == INCONCLUSIVE:
        pytest.skip(summary.results[0].reason)
    assert summary.to_json()["survivors"] == [mutant.id], summary.results


def test_the_remaining_time_follows_the_finished_rows_of_the_same_kind() -> None:
    now = [0.0]
    wrong = [m for m in mutants.catalogue() if m.phase == "check" and m.backend == "eager" and not m.honest][
        :8
    ]
    control = mutants.find("H1/sum/eager/wrapped")
    remaining = RemainingTime(jobs=2, clock=lambda: now[0])
    remaining.plan([(m, ("check",)) for m in wrong])
    remaining.plan([(control, ("kernels", "clock", "check"))])
    for mutant in wrong[:4]:
        remaining.finish("check", mutant, 1.0)
    before = remaining()
    # Four wrong rows of a second each; a control's check by the ratio that the wrong rows showed.
    check = 1.0 * CONTROL_FACTOR
    others = STEP_SECONDS["kernels"] / 2 + STEP_SECONDS["clock"]
    assert before == pytest.approx((4 * 1.0 + check) / 2 + others)
    now[0] += 1.5
    assert remaining() == pytest.approx(before - 1.5)
    remaining.finish("clock", control, 9.0)  # alone on the machine
    assert remaining() == pytest.approx((4 * 1.0 + check) / 2 + STEP_SECONDS["kernels"] / 2)
    for step, mutant in (("kernels", control), ("check", control), *(("check", m) for m in wrong[4:])):
        remaining.finish(step, mutant, 1.0)
    assert remaining() == 0.0


def test_a_wrong_row_is_not_expected_beyond_the_step_that_is_meant_for_it() -> None:
    by_clock, by_kernels = (
        mutants.find("C02/matmul/eager/whole"),
        next(
            m
            for m in mutants.catalogue()
            if set(m.killed_by) & {"provenance", "observed"} and m.problem is None
        ),
    )
    for mutant, steps in ((by_clock, ("kernels", "clock")), (by_kernels, ("kernels",))):
        remaining = selftest.remaining_time([mutant], mutant.devices[0], 1)
        planned = {step for (step, *_), kind in remaining.kinds.items() if kind.left}
        assert planned == set(steps) or selftest.why_not_run(mutant, mutant.devices[0])
