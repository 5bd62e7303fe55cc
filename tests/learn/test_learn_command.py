"""``weft learn``: the learner's folder, the verbs and their JSON, and code that does not end as it should."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from markupsafe import Markup
from typer.testing import CliRunner

from weft.cli import app
from weft.core.errors import WeftError
from weft.learn import progress
from weft.learn.exercise import find, path
from weft.learn.grade import grade
from weft.learn.page import blocks

PLAIN = "ceil_div"  # an exercise in plain Python: graded in a tenth of a second


def learn(folder: Path, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["learn", *arguments, "--folder", str(folder)])
    assert result.exit_code == code, result.output
    return result.stdout


def answer(folder: Path, identifier: str = PLAIN, kind: str = "answer") -> Path:
    exercise = find(identifier)
    file = progress.load(folder).file_of(exercise)
    file.write_text(exercise.source_file(kind).read_text())
    return file


def test_from_the_first_exercise_to_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "learn"
    assert "--> " in learn(folder) and not folder.exists()
    shown = learn(folder, "next", PLAIN)
    file = answer(folder, kind="wrong")
    assert find(PLAIN).title in shown and file.name in shown
    refused = learn(folder, "check", code=1)
    assert "not passed: ceil_div" in refused and "one block too many" in refused
    answer(folder)
    assert "passed: ceil_div" in learn(folder, "check")
    assert progress.load(folder).done == [PLAIN]
    assert "[x]" in learn(folder) and f"1 of {len(path())} exercises done" in learn(folder, "status")
    following = progress.load(folder).next_exercise()
    assert following is not None and following.id != PLAIN
    assert following.title in learn(folder, "next")


def test_the_json_of_status_and_check(tmp_path: Path) -> None:
    learn(tmp_path, "next", PLAIN)
    (status,) = json.loads(learn(tmp_path, "status", "--json")).values()
    assert [e["id"] for e in status] == [e.id for e in path()]
    assert all(set(e) == {"id", "title", "backend", "done"} and e["done"] is False for e in status)
    refused = json.loads(learn(tmp_path, "check", PLAIN, "--json", "--seed", "5", code=1))
    assert set(refused) == {"exercise", "passed", "reason", "checks"}
    assert refused["passed"] is False and refused["reason"] and not refused["checks"][-1]["passed"]
    answer(tmp_path)
    accepted = json.loads(learn(tmp_path, "check", PLAIN, "--json"))
    assert accepted["passed"] is True and accepted["reason"] is None
    assert all(c["passed"] for c in accepted["checks"])
    assert json.loads(learn(tmp_path, "status", "--json"))["exercises"][find(PLAIN).number - 1]["done"]


def test_a_file_of_the_learner_is_never_overwritten(tmp_path: Path) -> None:
    learn(tmp_path, "next", PLAIN)
    file = progress.load(tmp_path).file_of(find(PLAIN))
    file.write_text("my work")
    assert "left as it is" in learn(tmp_path, "next", PLAIN)
    assert json.loads(learn(tmp_path, "next", PLAIN, "--json"))["written"] is False
    assert file.read_text() == "my work"
    # A longer path numbers the exercises anew: the file keeps its old name.
    renumbered = file.rename(tmp_path / f"99_{PLAIN}.py")
    learn(tmp_path, "next", PLAIN)
    assert not file.exists() and progress.load(tmp_path).file_of(find(PLAIN)) == renumbered


def test_each_hint_goes_further_and_the_last_one_stays(tmp_path: Path) -> None:
    hints = find(PLAIN).hints()
    replies = [json.loads(learn(tmp_path, "hint", PLAIN, "--json")) for _ in range(len(hints) + 1)]
    assert [r["hint"] for r in replies] == [*hints, hints[-1]]
    assert hints[-1] in learn(tmp_path, "hint", PLAIN)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 1}', '{"version": 1, "current": 3, "done": [], "hints": {}}']
)
def test_damaged_progress_is_one_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / progress.FILE_NAME).write_text(content)
    with pytest.raises(WeftError, match=r"is damaged.*hint: delete it"):
        progress.load(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chek",), "did you mean check"),
        (("check",), "no exercise is started"),
        (("check", PLAIN), "writes the starting file"),
        (("show", "999"), "a number from 1 to"),
        (("show", "ceil_dv"), "did you mean ceil_div"),
        (("status", PLAIN), "expected no exercise"),
        (("next", "--seed", "1"), "--seed: expected weft learn check"),
    ],
)
def test_a_wrong_call_has_an_expectation_or_a_hint(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = CliRunner().invoke(app, ["learn", *arguments, "--folder", str(tmp_path)])
    assert isinstance(result.exception, WeftError) and message in str(result.exception)


def test_the_page_has_every_exercise_and_loads_nothing(tmp_path: Path) -> None:
    learn(tmp_path, "next", PLAIN)
    answer(tmp_path)
    learn(tmp_path, "check")
    page = tmp_path / "page.html"
    learn(tmp_path, "page", "-o", str(page))
    html = page.read_text()
    assert all(f">{e.id}<" in html for e in path())
    assert html.count('<li class="done">') == 1 and html.count('<li class="next">') == 1
    assert "prefers-color-scheme: dark" in html and "width=device-width" in html
    assert "http" not in html.replace("http-equiv", "") and "src=" not in html


def test_the_page_wraps_prose_and_keeps_the_lines_of_code() -> None:
    text = (
        "A *map*: x < n,\n`a * b` and **no** c * d.\n\n    x = 1\n      y\n\n    z\n\n- one\n  two\n- three"
    )
    assert blocks(text) == [
        ("prose", "A <em>map</em>: x &lt; n, <code>a * b</code> and <strong>no</strong> c * d."),
        ("pre", "x = 1\n  y\n\nz"),
        ("item", "one two"),
        ("item", "three"),
    ]


def test_the_page_loses_no_word_of_any_text() -> None:
    for exercise in path():
        page_blocks = blocks(exercise.text())
        texts = (html.unescape() if kind == "pre" else _without_tags(html) for kind, html in page_blocks)
        words = re.sub(r"^\|-.*|[`*|]|^- ", "", exercise.text(), flags=re.M).split()
        assert re.sub(r"[`*|]", "", " ".join(texts)).split() == words, exercise.id


def _without_tags(html: Markup) -> str:
    return Markup(re.sub(r"</td>", " ", html)).striptags()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("while True:\n    pass\n", "Does a loop never end?"),
        ("import os\nos._exit(0)\n", "the process ended early"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "the process crashed (SIGSEGV)"),
        ("def blocks(n, threads):\n    return 1 // 0\n", "the file has no idle"),
        ("def idle(n, threads): 0\ndef blocks(n, t):\n    return 1 // 0\n", "line 3: ZeroDivisionError"),
        ("def blocks(:\n", "line 1: invalid syntax"),
        ("raise SystemExit\n", "the process ended early"),
        ("def idle(n, t): return None\nblocks = lambda n, t: None\n", "expected 0, got None"),
    ],
)
def test_code_that_does_not_end_as_it_should_has_a_reason(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "solution.py"
    file.write_text(text)
    result = grade(find(PLAIN), file, seconds=1.5)
    assert not result.passed and reason in result.reason


def test_what_the_code_prints_is_kept_apart(tmp_path: Path) -> None:
    file = tmp_path / "solution.py"
    file.write_text(find(PLAIN).source_file("answer").read_text() + "print('looking at n')\n")
    result = grade(find(PLAIN), file)
    assert result.passed and result.printed == "looking at n\n"
