"""``weft judge FOLDER``: matching, scheduling, resuming and scoring of a folder of problems."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.cli import main
from weft.core import WeftError
from weft.workbench.judge.suite import Suite, SuiteOptions, append, find_pairs, read_done, score

PROBLEM = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return {body}
def get_inputs():
    return [torch.rand(9, 17)]
def get_init_inputs():
    return []
"""
BODIES = {
    "1_relu": "torch.relu(x - 0.5)",
    "2_square": "x * x",
    "10_softmax": "torch.softmax(x, 1)",
    "11_sum": "x.sum(1)",
    "12_tanh": "torch.tanh(x)",
}
WRONG = {"2_square": "x * x + 1e-3", "12_tanh": "torch.relu(x)"}
OPTIONS = SuiteOptions(arguments={"time": False, "limits": {"seconds": 60.0}})


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Five problems in natural order, and a candidate for each: two of them wrong."""
    return write_suite(tmp_path, tuple(BODIES))


def write_suite(tmp_path: Path, names: tuple[str, ...]) -> tuple[Path, Path]:
    problems, candidates = tmp_path / "problems", tmp_path / "candidates"
    for folder in (problems / "level1", candidates / "level1"):
        folder.mkdir(parents=True)
    for name in names:
        body = BODIES[name]
        (problems / "level1" / f"{name}.py").write_text(PROBLEM.format(body=body))
        text = PROBLEM.format(body=WRONG.get(name, body)).replace("Model(", "ModelNew(")
        (candidates / "level1" / f"{name}.py").write_text(text)
    (problems / "helpers.py").write_text("def help(): ...\n")  # no problem
    return problems, candidates


def test_problems_and_candidates_are_matched_by_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    problems, candidates = folders
    names = [p.name for p in find_pairs(problems, candidates)]
    assert names == [f"level1/{n}" for n in ("1_relu", "2_square", "10_softmax", "11_sum", "12_tanh")]
    flat = tmp_path / "flat"
    (flat / "11_sum").mkdir(parents=True)
    for file in ("10_softmax.py", "11_sum/a.py", "11_sum/b.py", "level_1_problem_2_sample_0_kernel.py"):
        (flat / file).write_text("class ModelNew: ...")
    pairs = {p.name: p.candidate for p in find_pairs(problems, flat)}
    assert {n: c.name for n, c in pairs.items() if c} == {
        "level1/2_square": "level_1_problem_2_sample_0_kernel.py",
        "level1/10_softmax": "10_softmax.py",
        "level1/11_sum/a": "a.py",
        "level1/11_sum/b": "b.py",
    }
    assert [n for n, c in pairs.items() if c is None] == ["level1/1_relu", "level1/12_tanh"]
    for problems_folder, other in ((tmp_path / "flat", candidates), (problems, tmp_path / "none")):
        with pytest.raises(WeftError):
            find_pairs(problems_folder, other)


@pytest.mark.slow
@pytest.mark.pooled(1, "suites")
def test_a_suite_is_judged_saved_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Three problems: each judgement is a process that imports PyTorch, and starts others that do.
    problems, candidates = write_suite(tmp_path, ("1_relu", "2_square", "12_tanh"))
    results = tmp_path / "results.jsonl"
    monkeypatch.setenv("NO_COLOR", "1")
    weft = command(monkeypatch)
    arguments = (problems, "--candidates", candidates, "--no-time", "--save", results, "--jobs", "2")
    assert weft(*arguments, "--json") == 1
    output = json.loads(capsys.readouterr().out)
    rows = {r["problem"].removeprefix("level1/"): r for r in output["results"]}
    assert {n for n, r in rows.items() if r["correct"]} == {"1_relu"}
    assert all(rows[n]["reason"].startswith("error: ") for n in WRONG), rows
    assert output["score"]["counts"] == {"correct": 1, "wrong": 2, "not run": 0, "no candidate": 0}
    assert output["score"]["fast_p"]["0"] == 1 / 3
    assert len(results.read_text().splitlines()) == 3
    # A changed candidate is judged again, the others are not; a line that was cut off does no harm.
    with results.open("a") as file:
        file.write('{"problem": "level1/1_relu", "cor')
    (candidates / "level1" / "12_tanh.py").write_text(
        PROBLEM.format(body=BODIES["12_tanh"]).replace("Model(", "ModelNew(")
    )
    assert weft(*arguments, "--resume") == 1
    captured = capsys.readouterr()
    assert "2 of 3 are in" in captured.err and "12_tanh: correct" in captured.err
    assert "2 correct, 1 wrong" in captured.out and "fast_0 66.7%" in captured.out
    assert len(results.read_text().splitlines()) == 5
    # Other options are another judgement.
    pairs = find_pairs(problems, candidates)
    assert read_done(results, pairs, SuiteOptions(arguments={"time": True})) == {}


@pytest.mark.slow
@pytest.mark.pooled(1, "suites")
def test_a_suite_that_is_stopped_leaves_no_process(folders: tuple[Path, Path]) -> None:
    suite = Suite(find_pairs(*folders)[:3], SuiteOptions(jobs=2, arguments=OPTIONS.arguments))
    rows = iter(suite)
    next(rows)
    # Between imports and timings there may have been no moment to start it.
    suite.spare = suite.spare or suite._start()
    processes = [c.process for c in (*suite.running, suite.spare)]
    rows.close()  # type: ignore[attr-defined]
    assert processes and all(p.poll() is not None for p in processes)


@pytest.mark.slow
@pytest.mark.pooled(1, "suites")
def test_a_spare_process_takes_the_next_pair_and_its_end_costs_none(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = find_pairs(*folders)
    suite = Suite(pairs[:3], SuiteOptions(jobs=1, arguments=OPTIONS.arguments))
    start, spares = suite._start, []

    def start_second_broken() -> object:
        with monkeypatch.context() as patch:
            if len(spares) == 1:
                patch.setattr("weft.workbench.judge.suite._CHILD", "raise SystemExit(1)")
            spares.append(start())
        return spares[-1]

    monkeypatch.setattr(suite, "_start", start_second_broken)
    assert [(r["problem"], r["correct"]) for r in suite] == [
        ("level1/1_relu", True),
        ("level1/2_square", False),
        ("level1/10_softmax", True),
    ]
    assert [c.pair is None for c in spares] == [False, True, False, False]
    suite = Suite(pairs[:2], SuiteOptions(jobs=1, arguments=OPTIONS.arguments))
    rows = iter(suite)
    next(rows)
    spare = suite.spare  # it imported while the first pair was judged
    assert spare is not None and next(rows)["problem"] == "level1/2_square" and spare.pair == pairs[1]


def test_a_process_that_imports_delays_the_timing_of_another() -> None:
    suite = Suite([], SuiteOptions(jobs=1))
    child, spare = FakeChild(0), FakeChild(1)
    suite.running, suite.spare = [child], spare  # type: ignore[assignment,list-item]
    child.state, spare.state = "waits for time", "importing"
    suite._grant()
    assert child.state == "waits for time"
    on_a_gpu = Suite([], SuiteOptions(jobs=1))
    on_a_gpu.imports_disturb = False  # many cores, and time that a GPU takes
    on_a_gpu.running, on_a_gpu.spare = [other := FakeChild(2)], spare  # type: ignore[assignment,list-item]
    other.state = "waits for time"
    on_a_gpu._grant()
    assert other.state == "timing"
    suite._handle(spare, {"wait": "job", "bytes": 0})  # type: ignore[arg-type]
    suite._grant()
    assert (child.state, spare.state) == ("timing", "waits for a job")


def test_one_judgement_measures_time_alone() -> None:
    """The schedule: checks side by side within the memory, timing without any other."""
    suite = Suite([], SuiteOptions(jobs=3))
    suite.memory = 100
    children = [FakeChild(n) for n in range(3)]
    suite.running = list(children)  # type: ignore[assignment]
    for child, needs in zip(children, (60, 60, 30), strict=True):
        suite._handle(child, {"wait": "memory", "bytes": needs})  # type: ignore[arg-type]
    suite._grant()
    assert [c.state for c in children] == ["checking", "waits for memory", "checking"]
    suite._handle(children[0], {"wait": "time", "bytes": 0})  # type: ignore[arg-type]
    suite._grant()
    assert [c.state for c in children] == ["waits for time", "waits for memory", "checking"]
    suite._handle(children[2], {"wait": "time", "bytes": 0})  # type: ignore[arg-type]
    suite._grant()
    assert [c.state for c in children] == ["timing", "waits for memory", "waits for time"]
    suite._grant()
    assert [c.state for c in children] == ["timing", "waits for memory", "waits for time"]
    del suite.running[0]
    suite._grant()
    assert [c.state for c in children[1:]] == ["waits for memory", "timing"]
    suite.running = [children[1]]  # type: ignore[list-item]
    children[1].needs = 1000  # alone it may always start: the judgement reports what lacks
    suite._grant()
    assert children[1].state == "checking"


class FakeChild:
    """Stand-in of a judging process: it has a state and reads permissions."""

    def __init__(self, number: int) -> None:
        self.number, self.state, self.needs, self.pair = number, "reading", 0, None
        self.process = self
        self.stdin = self

    def write(self, text: str) -> None:
        assert text == "go\n"

    def flush(self) -> None: ...


def test_the_score_counts_all_problems() -> None:
    def row(correct: bool, speedup: float | None, reason: str = "", candidate: str | None = "c") -> dict:
        shown = speedup is not None and abs(speedup - 1.0) > 0.1
        row = {"candidate": candidate, "correct": correct, "reason": reason, "speedup": speedup}
        return row | {"difference_shown": shown}

    rows = [
        row(True, 4.0),
        row(True, 1.01),  # no more than the reference differs from itself
        row(True, None),
        row(False, 9.0, "error: wrong"),
        row(False, None, "not run: needs a GPU"),
        row(False, None, "no candidate", None),
    ]
    result = score(rows)
    assert result["counts"] == {"correct": 3, "wrong": 1, "not run": 1, "no candidate": 1}
    assert result["fast_p"] == {"0": 3 / 6, "1": 1 / 6, "1.5": 1 / 6, "2": 1 / 6}
    assert result["speedup"] == pytest.approx(2.01, abs=0.01) and result["timed"] == 2


def test_rows_are_appended_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "r.jsonl"
    append(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"cut')
    append(path, {"b": 2})
    assert [line for line in path.read_text().splitlines() if line != '{"cut'] == ['{"a": 1}', '{"b": 2}']


def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return the command line in this process; it returns the exit code."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["weft", "judge", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        return int(done.value.code or 0)

    return run


def test_options_of_a_folder_need_a_folder(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems, candidates = folders
    weft, one = command(monkeypatch), problems / "level1" / "1_relu.py"
    for arguments in (
        (one,),
        (one, one, "--resume"),
        (one, "--candidates", candidates),
        (problems, one, "--candidates", candidates),
        (problems, "--candidates", candidates, "--resume"),
        (problems, "--candidates", candidates, "--jobs", "0"),
    ):
        assert weft(*arguments) == 2, arguments
        assert capsys.readouterr().err
