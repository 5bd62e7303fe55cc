"""``Exercise``: one folder below ``exercises/``, and the path, which is all exercises in their order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from weft.core.errors import WeftError
from weft.core.json_files import read_json
from weft.core.operator import unknown_name

FOLDER = Path(__file__).with_name("exercises")
TRACKS = ("cuda", "triton", "numba", "python")  # in the order of the path
SUFFIXES = {"cuda": ".cu", "triton": ".py", "numba": ".py", "python": ".py"}
PLANTED = ("wrong", "lucky")  # answers that the grader must refuse
BY_FILE = re.compile(r"(\d+)(?:_(\w+))?(?:\.\w+)?")


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """An exercise: its id (the folder's name), its track, chapter and number on the path, from 1."""

    id: str
    track: str
    chapter: str
    number: int

    @property
    def folder(self) -> Path:
        return FOLDER / self.track / self.id

    @property
    def suffix(self) -> str:
        return SUFFIXES[self.track]

    @property
    def file_name(self) -> str:
        """The learner's file: ``07_float4_tail.cu``."""
        return f"{self.number:02}_{self.id}{self.suffix}"

    @property
    def title(self) -> str:
        return self._read("text.md").partition("\n")[0].removeprefix("# ").strip()

    def text(self) -> str:
        """Return the text below the title."""
        return self._read("text.md").partition("\n")[2].strip() + "\n"

    def hints(self) -> list[str]:
        """Return the hints in their order; lines of three dashes separate them in ``hints.md``."""
        return [hint.strip() for hint in re.split(r"^---$", self._read("hints.md"), flags=re.M)]

    def source_file(self, kind: str) -> Path:
        """Return the file of ``start``, ``answer``, ``wrong`` or ``lucky``."""
        return self.folder / f"{kind}{self.suffix}"

    def grader(self) -> ModuleType:
        """Import ``grade.py``: ``grade(candidate, generator)``, ``WRONG`` and ``LUCKY``."""
        return import_module(f"weft.learn.exercises.{self.track}.{self.id}.grade")

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")


@cache
def path() -> tuple[Exercise, ...]:
    """Return all exercises: track after track, in the order of each track's ``chapters.json``."""
    entries = [
        (track, chapter["title"], identifier)
        for track in TRACKS
        if (FOLDER / track / "chapters.json").is_file()
        for chapter in read_json(FOLDER / track / "chapters.json")
        for identifier in chapter["exercises"]
    ]
    return tuple(
        Exercise(id=identifier, track=track, chapter=chapter, number=number)
        for number, (track, chapter, identifier) in enumerate(entries, 1)
    )


def find(name: str) -> Exercise:
    """Return an exercise by its id, its number (``7``) or its file (``07_float4_tail.cu``).

    Raises :class:`WeftError` with the nearest ids if there is none.
    """
    exercises = path()
    plain = Path(name).name
    for exercise in exercises:
        if plain in (exercise.id, exercise.file_name, exercise.file_name.removesuffix(exercise.suffix)):
            return exercise
    by_file = BY_FILE.fullmatch(plain)
    if by_file and by_file[2] is None:
        if 1 <= int(by_file[1]) <= len(exercises):
            return exercises[int(by_file[1]) - 1]
        raise WeftError("exercise", expected=f"a number from 1 to {len(exercises)}", got=name)
    raise unknown_name("exercise", name, [e.id for e in exercises])
