"""The map of the path as one self-contained HTML page, in the style of the report."""

from __future__ import annotations

import base64
import hashlib

import jinja2
from markupsafe import Markup

from weft.learn.exercise import Exercise, path
from weft.learn.progress import Progress
from weft.workbench.report.page import template_source, templates

TRACK_TITLES = {"cuda": "CUDA C++", "triton": "Triton", "numba": "Numba", "python": "Python"}


def page(progress: Progress) -> str:
    """Return the page as HTML: chapters with their exercises, which are done, and each one's text."""
    script = Markup(template_source("page.js"))
    environment = templates().overlay(loader=jinja2.PackageLoader("weft.learn"))
    following = progress.next_exercise()
    return environment.get_template("learn.html.j2").render(
        chapters=_chapters(),
        done=set(progress.done),
        following=following.id if following else None,
        total=len(path()),
        count=sum(e.id in progress.done for e in path()),
        style=Markup(template_source("page.css")),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _chapters() -> list[tuple[str, str, list[Exercise]]]:
    """Return (track, title, exercises) of each chapter in the order of the path."""
    chapters: dict[tuple[str, str], list[Exercise]] = {}
    for exercise in path():
        chapters.setdefault((TRACK_TITLES[exercise.track], exercise.chapter), []).append(exercise)
    return [(*key, exercises) for key, exercises in chapters.items()]


def chapter_table() -> str:
    """Return the path as a table in Markdown: chapters with the titles of their exercises."""
    lines = ["| chapter | exercises |", "| --- | --- |"]
    for track, title, exercises in _chapters():
        lines.append(f"| {title} ({track}) | {'; '.join(e.title for e in exercises)} |")
    return "\n".join(lines)
