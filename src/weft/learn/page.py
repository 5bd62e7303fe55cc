"""The map of the path as one self-contained HTML page, in the style of the report."""

from __future__ import annotations

import base64
import hashlib
import re

import jinja2
from markupsafe import Markup, escape

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
        blocks=blocks,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def blocks(text: str) -> list[tuple[str, Markup]]:
    """Return (kind, HTML) of each block of a text: ``prose``, ``item`` of a list, ``table`` or ``pre``.

    Prose is wrapped anew by the browser, so that a phone needs no scrolling; code and drawings keep their
    lines.

    >>> blocks("A *map* of `x*y`:\\n\\n    y = x\\n\\n- one,\\n  two\\n- three")[2:]
    [('item', Markup('one, two')), ('item', Markup('three'))]
    """
    result: list[tuple[str, Markup]] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if block.startswith("|"):
            rows = [row.strip("| ").split("|") for row in block.splitlines() if not row.startswith("|---")]
            cells = ("".join(f"<td>{_inline(text.strip())}</td>" for text in row) for row in rows)
            result.append(("table", Markup("".join(f"<tr>{row}</tr>" for row in cells))))
        elif block.startswith("    "):
            lines = block.replace("\n    ", "\n").removeprefix("    ")
            # Code with an empty line in it stays in one piece.
            if result and result[-1][0] == "pre":
                lines = f"{result.pop()[1].unescape()}\n\n{lines}"
            result.append(("pre", escape(lines)))
        elif block.startswith("- "):
            items = block.removeprefix("- ").split("\n- ")
            result += [("item", _inline(" ".join(item.split()))) for item in items]
        else:
            result.append(("prose", _inline(" ".join(block.split()))))
    return result


def _inline(text: str) -> Markup:
    """Return one line of Markdown with its code, emphasis and strong emphasis as HTML."""
    pieces = []
    for number, piece in enumerate(text.split("`")):
        html = str(escape(piece))
        if number % 2:
            pieces.append(f"<code>{html}</code>")
            continue
        html = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", html)
        pieces.append(re.sub(r"(?<!\w)\*(\S[^*]*?)(?<=\S)\*(?!\w)", r"<em>\1</em>", html))
    return Markup("".join(pieces))


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
