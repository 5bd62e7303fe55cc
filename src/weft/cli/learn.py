"""``weft learn``: a path of short graded exercises in CUDA C++, Triton, Numba and Python, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output
from weft.cli.options import MAX_SEED, Json
from weft.core.errors import WeftError

if TYPE_CHECKING:
    from weft.learn.exercise import Exercise
    from weft.learn.progress import Progress

EPILOG = """Examples:
  weft learn next
  weft learn check
  weft learn cards -o cards.tsv

The path and its rules: weft help path"""
VERBS = ("next", "show", "check", "hint", "status", "page", "cards")
DEFAULT_FOLDER, DEFAULT_PAGE = Path("weft-learn"), Path("weft-learn.html")
DEFAULT_CARDS = Path("weft-cards.tsv")


def learn(
    verb: Annotated[
        str | None,
        typer.Argument(metavar="VERB", help=f"{', '.join(VERBS)} [default: show where you are]"),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(metavar="ID", help="Exercise: id, number or file name [default: the current one]"),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--folder", metavar="FOLDER", help="Your exercise files and your progress")
    ] = DEFAULT_FOLDER,
    page_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=f"page, cards: file [default: {DEFAULT_PAGE}, {DEFAULT_CARDS}]",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, max=MAX_SEED, help="check: seed of the inputs [default: a new one]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Learn to write GPU kernels: short exercises that are graded here, without a GPU.

    next [ID]: write the next exercise's starting file and show its text. No file of yours is overwritten.

    show [ID]: show an exercise's text. check [ID]: grade your file. hint [ID]: one hint more each time.

    status: the chapters with the number of exercises done. page: the path as an HTML page.

    cards: question and answer cards from checked facts, as a text file that Anki imports.

    Exit 0: done or passed; 1: check did not pass; 2: invalid arguments, or a missing compiler.
    """
    from weft.learn.progress import load

    _validate(verb, name, page_file, seed)
    if verb == "cards":
        _cards(page_file or DEFAULT_CARDS, as_json)
        return
    progress = load(folder)
    if verb is None or verb == "status":
        _overview(progress, as_json, by_chapter=verb == "status")
    elif verb == "next":
        _next(progress, name, as_json)
    elif verb == "show":
        _show(_exercise(progress, name), progress, as_json)
    elif verb == "hint":
        _hint(progress, _exercise(progress, name), as_json)
    elif verb == "page":
        _page(progress, page_file or DEFAULT_PAGE, as_json)
    else:
        _check(progress, _exercise(progress, name), seed, as_json)


def _validate(verb: str | None, name: str | None, page_file: Path | None, seed: int | None) -> None:
    from weft.core.operator import unknown_name

    if verb is not None and verb not in VERBS:
        raise unknown_name("verb of weft learn", verb, list(VERBS))
    if name is not None and verb in ("status", "page", "cards"):
        raise WeftError(f"weft learn {verb}", expected="no exercise", got=name)
    options = (("--output", page_file, ("page", "cards")), ("--seed", seed, ("check",)))
    for option, value, owners in options:
        if value is not None and verb not in owners:
            expected = " or ".join(f"weft learn {owner}" for owner in owners)
            raise WeftError(option, expected=expected, got=f"weft learn {verb or ''}".strip())


def _exercise(progress: Progress, name: str | None) -> Exercise:
    """Return the named exercise, or else the current one."""
    from weft.learn.exercise import find

    if name is not None:
        return find(name)
    current = progress.current_exercise()
    if current is None:
        raise WeftError(
            "no exercise is started in this folder",
            expected="an ID, or a current exercise",
            got=str(progress.folder),
            hint="weft learn next starts one",
        )
    return current


def _overview(progress: Progress, as_json: bool, *, by_chapter: bool) -> None:
    """Print the path with marks, or the number of done exercises in each chapter, and what is next."""
    from weft.learn.exercise import path

    exercises, done = path(), set(progress.done)
    if as_json:
        entries = [
            {"id": e.id, "title": e.title, "backend": e.track, "done": e.id in done} for e in exercises
        ]
        print(json.dumps({"exercises": entries}))
        return
    following = progress.next_exercise()
    chapters: dict[tuple[str, str], list[Exercise]] = {}
    for exercise in exercises:
        chapters.setdefault((exercise.track, exercise.chapter), []).append(exercise)
    for (track, title), members in chapters.items():
        count = f"{sum(e.id in done for e in members)}/{len(members)}"
        output.show_notes([f"{f'{title} ({track})':64} {count:>7}"], style="bold")
        for e in () if by_chapter else members:
            mark = "[x]" if e.id in done else "-->" if e == following else "[ ]"
            output.show_notes([f"  {mark} {e.number:2} {e.title}"], indent="         ", style="")
    line = f"{len(done & {e.id for e in exercises})} of {ending.count_text(len(exercises), 'exercise')} done"
    if following is not None:
        verb = "check" if following.id == progress.current else "next"
        line += f"; now: {following.number} {following.title}: weft learn {verb}"
    ending.print_verdict(line)


def _next(progress: Progress, name: str | None, as_json: bool) -> None:
    from weft.learn.exercise import find

    exercise = find(name) if name is not None else progress.next_exercise()
    if exercise is None:
        if as_json:
            print(json.dumps({"id": None}))
        else:
            ending.print_verdict("all exercises are done")
        return
    is_new = progress.start(exercise)
    _show(exercise, progress, as_json, written=is_new)


def _show(exercise: Exercise, progress: Progress, as_json: bool, *, written: bool | None = None) -> None:
    """Print an exercise's text; ``written``: was its file just written (None: not asked)."""
    file = progress.file_of(exercise)
    if as_json:
        fields: dict[str, Any] = {"id": exercise.id, "title": exercise.title, "backend": exercise.track}
        fields |= {"text": exercise.text(), "file": str(file) if file.exists() else None}
        print(json.dumps(fields if written is None else fields | {"written": written}))
        return
    print(f"{exercise.number}. {exercise.title}\n")
    print(exercise.text())
    if written is None and not file.exists():
        ending.print_verdict(f"start it: weft learn next {exercise.id}")
        return
    state = "wrote" if written else "your file is left as it is:" if written is not None else "your file:"
    ending.print_verdict(f"{state} {file}; edit it, then: weft learn check")


def _hint(progress: Progress, exercise: Exercise, as_json: bool) -> None:
    hints = exercise.hints()
    number = min(progress.hints.get(exercise.id, 0) + 1, len(hints))
    progress.hints[exercise.id] = number
    progress.save()
    if as_json:
        print(
            json.dumps(
                {"exercise": exercise.id, "hint": hints[number - 1], "number": number, "of": len(hints)}
            )
        )
        return
    print(f"{exercise.number}. {exercise.title}: hint {number} of {len(hints)}\n\n{hints[number - 1]}")


def _check(progress: Progress, exercise: Exercise, seed: int | None, as_json: bool) -> None:
    from weft.learn.grade import grade

    file = progress.file_of(exercise)
    if not file.is_file():
        hint = f"weft learn next {exercise.id} writes the starting file"
        raise WeftError(f"exercise {exercise.id}", expected=f"your file {file}", got="none", hint=hint)
    watch = ending.Stopwatch()
    result = grade(exercise, file, seed=seed)
    if result.printed:
        output.log(result.printed.rstrip())
    if result.passed and exercise.id not in progress.done:
        progress.done.append(exercise.id)
        progress.save()
    if as_json:
        print(json.dumps(result.to_json()))
    elif result.passed:
        ending.print_verdict(
            f"passed: {exercise.id}, {ending.count_text(len(result.checks), 'check')} ({watch})"
        )
        following = progress.next_exercise()
        after = "the path is complete" if following is None else f"next: {following.title}: weft learn next"
        output.show_notes([after], style="")
    else:
        output.show_notes([f"not passed: {exercise.id} ({watch})", result.reason], style="")
        output.show_notes(["stuck? weft learn hint"])
    if not result.passed:
        raise typer.Exit(1)


def _page(progress: Progress, file: Path, as_json: bool) -> None:
    from weft.core.output_files import require_writable
    from weft.learn.page import page

    require_writable(file, "--output")
    file.write_text(page(progress), encoding="utf-8")
    if as_json:
        print(json.dumps({"page": str(file)}))
    else:
        ending.print_verdict(f"wrote {file}")


def _cards(file: Path, as_json: bool) -> None:
    """Write the cards for Anki, or print them as JSON; say which topics cannot be made here, and why."""
    from collections import Counter

    from weft.core.output_files import require_writable
    from weft.learn import cards

    deck, missing = cards.cards()
    for topic, reason in missing.items():
        output.log(f"no cards about {topic}: {reason}")
    if as_json:
        print(json.dumps({"cards": [card.to_json() for card in deck], "missing": missing}))
        return
    require_writable(file, "--output")
    file.write_text(cards.anki(deck), encoding="utf-8")
    topics = Counter(card.topic for card in deck)
    counts = ", ".join(f"{count} {topic}" for topic, count in topics.items())
    ending.print_verdict(f"wrote {ending.count_text(len(deck), 'card')} to {file}: {counts}")
