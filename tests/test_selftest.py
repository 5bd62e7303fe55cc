"""The selftest is tested: weaken the judge, and it must fail; leave it whole, and it passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weft.cli import selftest as command
from weft.core import WeftError
from weft.workbench import check_rules, mutants, selftest, selftest_honest, selftest_judge
from weft.workbench.mutants.mutant import Mutant
from weft.workbench.selftest_judge import KILLED, NOT_RUN, SURVIVED, Judged

CONTRACT = ["planted", "killed", "survivors", "not_run", "controls", "controls_passed", "by_check"]


def judged(*ids: str, without: tuple[str, ...] = ()) -> selftest.Summary:
    return selftest.run(selftest.select(ids=ids), "cpu", without=without)


def run(*arguments: str) -> Any:
    import typer

    app = typer.Typer()
    app.command()(command.selftest)
    return CliRunner().invoke(app, ["--device", "cpu", *arguments])


def _picked(*arguments: str) -> list[str]:
    return [a for one in arguments for a in ("--mutant", one)]


SOME = ("W02/softmax/eager/zeros", "C07/softmax/eager/lazy", "C12/softmax/eager/exit")
ONE_OFF = "W04/gelu/eager/one-element"
ON_GPU = "C05/softmax/eager/side-stream"


def test_a_whole_judge_kills_all_and_says_so() -> None:
    done = run("--json", *_picked(*SOME, ON_GPU))
    said = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert list(said)[: len(CONTRACT)] == CONTRACT
    assert (said["planted"], said["killed"], said["survivors"]) == (3, 3, [])
    assert said["by_check"] == {"error": 1, "type": 1, "channel": 1}
    assert said["not_run"] == [{"id": ON_GPU, "reason": mutants.find(ON_GPU).not_here}]
    assert said["unexpected"] == []


def test_the_screen_names_who_was_killed_and_who_was_not_run() -> None:
    done = run(*_picked(SOME[0], ON_GPU))
    assert done.exit_code == 0
    assert "killed 1 of 1 that ran" in done.stdout
    assert mutants.find(ON_GPU).not_here in done.stdout


def test_an_error_rule_that_always_passes_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check_rules.RULES, "error", lambda run: "")
    done = run(*_picked(ONE_OFF, SOME[1]))
    assert done.exit_code == 1
    assert f"survived: {ONE_OFF}" in done.stdout
    assert "killed 1 of 2 that ran" in done.stdout


def test_a_tolerance_that_is_far_too_wide_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    of = selftest_judge.Subject.of

    def lenient(mutant: Mutant) -> selftest_judge.Subject:
        subject = of(mutant)
        wide = replace(subject.operator.tolerance, c=1e9, ulps=1e9, reason="a test")
        return replace(subject, operator=replace(subject.operator, tolerance=wide, properties=()))

    monkeypatch.setattr(selftest_judge.Subject, "of", staticmethod(lenient))
    found = judged(ONE_OFF)
    assert found.to_json()["survivors"] == [ONE_OFF]
    assert not found.good


def test_a_rule_that_is_gone_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(check_rules.RULES, "written")
    found = judged("W16/softmax/eager/nan-unwritten")
    assert found.to_json()["survivors"] == ["W16/softmax/eager/nan-unwritten"]


def test_a_control_that_is_refused_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check_rules.RULES, "shape", lambda run: "no shape is good enough")
    found = judged("H5/balance/eager/differences")
    said = found.to_json()
    assert (said["controls"], said["controls_passed"]) == (1, 0)
    assert said["false_alarms"][0]["check"] == "shape"
    assert not found.good


def test_a_name_that_nothing_has_is_a_wrong_call() -> None:
    with pytest.raises(WeftError, match="did you mean guards"):
        judged(SOME[0], without=("guard",))
    with pytest.raises(WeftError, match="unknown row"):
        selftest.select(rows=["W99"])


def test_who_is_killed_by_another_check_is_listed() -> None:
    mutant = mutants.find(SOME[0])
    by_another = Judged(id=mutant.id, status=KILLED, check="written", reason="written: 3 of 4")
    said = selftest.Summary(judged=(by_another,), planted=(mutant,)).to_json()
    assert (said["planted"], said["killed"]) == (1, 1)
    assert said["unexpected"][0]["killed_by"] == "written"


def test_nothing_that_ran_is_no_pass() -> None:
    mutant = mutants.find(ON_GPU)
    none = Judged(id=mutant.id, status=NOT_RUN, reason="no GPU")
    assert not selftest.Summary(judged=(none,), planted=(mutant,)).good
    alive = Judged(id=mutant.id, status=SURVIVED)
    assert not selftest.Summary(judged=(alive,), planted=(mutant,)).good


def test_save_writes_what_json_prints(tmp_path: Path) -> None:
    file = tmp_path / "selftest.json"
    done = run("--json", "--save", str(file), *_picked(SOME[1]))
    assert json.loads(file.read_text()) == json.loads(done.stdout)


def test_the_list_runs_nothing() -> None:
    done = run("--list", "--row", "C01", "--operator", "gelu")
    assert done.exit_code == 0
    assert done.stdout.count("C01/gelu/eager/") == 3


@pytest.mark.slow
def test_an_honest_run_raises_no_alarm() -> None:
    found = selftest_honest.run(1, "cpu")
    assert found.runs == 1 and found.verdicts > 50
    assert found.alarms == ()


ONLY = {m.only: m for m in reversed(mutants.catalogue()) if m.only and "cpu" in m.devices}
# Sleeps its time away, twice; that it is killed by it alone is shown in test_remote_clock, too.
SLEEPS = "samples"


def _by_check() -> Iterator[Any]:
    for name, mutant in sorted(ONLY.items()):
        marks = [pytest.mark.alone] if "clock" in selftest.steps_of(mutant, ()) else []
        marks += [pytest.mark.exhaustive] if name == SLEEPS else []
        yield pytest.param(name, id=name, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(_by_check()))
def test_each_check_kills_one_that_nothing_else_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = ONLY[name]
    if "clock" in selftest.steps_of(mutant, ()):  # right at every case: a few will do
        every = selftest_judge.cases_of
        monkeypatch.setattr(selftest_judge, "cases_of", lambda *a: islice(every(*a), 5))
    found = judged(mutant.id)
    if found.judged[0].status == NOT_RUN:
        pytest.skip(found.judged[0].reason)
    assert found.good, found.to_json()
    assert judged(mutant.id, without=(name,)).to_json()["survivors"] == [mutant.id]
