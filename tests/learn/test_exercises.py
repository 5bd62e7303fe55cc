"""Every exercise's answer passes, and its wrong and lucky answers are refused for their reasons."""

from __future__ import annotations

import ast
import re
import shutil

import pytest

from weft.learn.exercise import FOLDER, PLANTED, Exercise, path
from weft.learn.grade import grade

IDS = [e.id for e in path()]
KINDS = ("answer", "start", *PLANTED)
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def check_grader(exercise: Exercise, kind: str) -> None:
    result = grade(exercise, exercise.source_file(kind))
    if kind == "answer":
        assert result.passed and result.checks, result.reason
        return
    assert not result.passed and result.reason
    # The starting file compiles and is no Python error: a learner begins with a reason about the exercise.
    assert result.checks[-1]["name"] not in ("compile", "import")
    if kind in PLANTED:
        assert getattr(exercise.grader(), kind.upper()) in result.reason, result.reason


def by_track(exercise: Exercise, kind: str) -> str:
    return f"{exercise.track} {'answer' if kind == 'answer' else 'refused'}"


@NEEDS_COMPILER
@pytest.mark.sampled(1, each=by_track)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exercise", path(), ids=IDS)
def test_the_answer_passes_and_the_others_are_refused_for_their_reasons(
    exercise: Exercise, kind: str
) -> None:
    check_grader(exercise, kind)


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("exercise", [e for e in path() if e.track in ("cuda", "python")], ids=lambda e: e.id)
def test_the_answer_passes_with_other_seeds(exercise: Exercise) -> None:
    """A grader whose inputs depend on luck would refuse a right answer now and then."""
    for seed in range(2):
        result = grade(exercise, exercise.source_file("answer"), seed=seed)
        assert result.passed, f"the seed {seed}: {result.reason}"


@pytest.mark.parametrize("exercise", path(), ids=IDS)
def test_a_folder_is_complete_and_keeps_the_lengths(exercise: Exercise) -> None:
    text, hints = exercise.text(), exercise.hints()
    lines = text.splitlines()
    assert exercise.title and len(exercise.title) <= 60
    assert 10 <= len(lines) <= 40 and max(map(len, lines)) <= 80
    assert "**Task.**" in text
    assert len(hints) >= 2 and all(hints)
    assert all(len(line) <= 80 for hint in hints for line in hint.splitlines())
    assert re.fullmatch(r"[a-z][a-z0-9_]*", exercise.id)
    for kind in KINDS:
        source = exercise.source_file(kind).read_text(encoding="utf-8")
        if exercise.suffix == ".py":
            ast.parse(source)
    grader = exercise.grader()
    assert grader.WRONG and grader.LUCKY


def test_every_folder_is_on_the_path_once() -> None:
    folders = {f.parent.name for f in FOLDER.glob("*/*/text.md")}
    assert sorted(folders) == sorted(IDS) and len(IDS) == len(set(IDS))
