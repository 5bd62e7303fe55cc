"""``Progress``: the learner's folder with the exercise files and ``progress.json``."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from weft.core.errors import WeftError
from weft.core.json_files import read_json
from weft.core.output_files import require_folder
from weft.learn.exercise import Exercise, path

FILE_NAME, VERSION = "progress.json", 1
MAX_BYTES = 1 << 20


@dataclass(kw_only=True)
class Progress:
    """Exercises that are done, the current one (an id), and the number of hints given for each."""

    folder: Path
    current: str | None = None
    done: list[str] = field(default_factory=list)
    hints: dict[str, int] = field(default_factory=dict)

    def file_of(self, exercise: Exercise) -> Path:
        """Return the learner's file of an exercise, also one that an older path numbered differently."""
        usual = self.folder / exercise.file_name
        others = sorted(self.folder.glob(f"[0-9]*_{exercise.id}{exercise.suffix}"))
        return usual if usual.exists() or not others else others[0]

    def current_exercise(self) -> Exercise | None:
        return next((e for e in path() if e.id == self.current), None)

    def next_exercise(self) -> Exercise | None:
        """Return the current exercise if it is not done, else the next one; None if all are done."""
        exercises = path()
        current = self.current_exercise()
        start = 0 if current is None else current.number - 1
        in_order = (*exercises[start:], *exercises[:start])
        return next((e for e in in_order if e.id not in self.done), None)

    def start(self, exercise: Exercise) -> bool:
        """Make an exercise the current one; write its starting file unless there is one. Return if it did."""
        require_folder(self.folder, "--folder")
        file, is_new = self.file_of(exercise), False
        if not file.exists():
            with file.open("x", encoding="utf-8") as opened:
                opened.write(exercise.source_file("start").read_text(encoding="utf-8"))
            is_new = True
        self.current = exercise.id
        self.save()
        return is_new

    def save(self) -> None:
        """Write ``progress.json``; a reader sees the old file or the new one, never a part."""
        require_folder(self.folder, "--folder")
        content = {"version": VERSION, "current": self.current, "done": self.done, "hints": self.hints}
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".progress.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=1) + "\n")
            os.replace(name, self.folder / FILE_NAME)
        except BaseException:
            os.unlink(name)
            raise


def load(folder: Path) -> Progress:
    """Read a folder's progress, empty without a file; raise :class:`WeftError` for a damaged one."""
    file = folder / FILE_NAME
    if folder.exists() and not folder.is_dir():
        raise WeftError("--folder", expected="a folder", got=f"the file {folder}")
    if not file.exists():
        return Progress(folder=folder)
    try:
        content = read_json(file, limit=MAX_BYTES)
        current, done, hints = content["current"], content["done"], content["hints"]
        valid = content["version"] == VERSION and (current is None or isinstance(current, str))
        valid &= isinstance(done, list) and all(isinstance(name, str) for name in done)
        valid &= isinstance(hints, dict) and all(type(n) is int and n >= 0 for n in hints.values())
        if not valid:
            raise ValueError("a field has another type")
    except (ValueError, LookupError, TypeError) as error:
        raise WeftError(
            f"{file} is damaged",
            expected="what weft learn wrote",
            got=f"{type(error).__name__}: {error}",
            hint="delete it: the exercise files stay, and weft learn check marks each one again",
        ) from error
    return Progress(folder=folder, current=current, done=done, hints=hints)
