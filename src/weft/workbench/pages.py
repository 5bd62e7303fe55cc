"""Pages of the documentation: found in a checkout or in the installed package, listed and read as Markdown.

A topic is a page's file name without its suffix (``correct``), or an operator, whose page is the README of
its folder. Wheels carry ``docs/`` as data files under ``share/weft/docs`` (see pyproject.toml).
"""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from weft.core import registry
from weft.core.errors import WeftError
from weft.core.operator import unknown_name

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = Path("share/weft/docs")  # below the prefix of an installation
SHELVES = ("start", "learn", "use", "bring", "speed", "trust", "contribute", "reference")
LINK = re.compile(r"- \[([^\]]+)\]\(([\w/-]+\.md)\)(?:: (.*))?")
INVISIBLE = re.compile(r"<!--.*?-->\n?|<picture>.*?</picture>\n*", re.S)


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page: its topic, shelf (folder), title, one line about it, and file."""

    topic: str
    shelf: str
    title: str
    summary: str
    file: Path

    def text(self) -> str:
        """Return the page as Markdown, without comments and pictures, which no terminal shows."""
        return INVISIBLE.sub("", self.file.read_text(encoding="utf-8")).strip() + "\n"


def folder() -> Path:
    """Return the folder of the documentation. Raise :class:`WeftError` if there is none."""
    candidates = [PACKAGE.parents[1] / "docs", *_installed()]
    for candidate in candidates:
        if (candidate / "index.md").is_file():
            return candidate
    raise WeftError(
        "the documentation is not installed",
        expected=str(candidates[-1]),
        got="no such folder",
        hint="install Weft from a wheel or read docs/ in a checkout",
    )


def _installed() -> list[Path]:
    """Return the folders in which an installer may have put the wheel's data files."""
    try:
        files = metadata.files("weft") or ()
    except metadata.PackageNotFoundError:
        files = ()
    recorded = [Path(str(f.locate())).parent for f in files if f.as_posix().endswith(f"{INSTALLED}/index.md")]
    return [*recorded, PACKAGE.parent / INSTALLED, Path(sysconfig.get_path("data")) / INSTALLED]


@cache
def pages() -> tuple[Page, ...]:
    """Return every page, by shelf; inside a shelf in the order of ``index.md``."""
    root = folder()
    index = (root / "index.md").read_text(encoding="utf-8")
    summaries = {path: (summary or title) for title, path, summary in LINK.findall(index)}
    listed = [
        Page(
            topic=file.stem,
            shelf=file.parent.name if file.parent != root else "",
            title=_title(file),
            summary=summaries.get(file.relative_to(root).as_posix(), ""),
            file=file,
        )
        for file in sorted(root.rglob("*.md"))
    ]
    order = list(summaries)

    def position(page: Page) -> tuple[int, int]:
        shelf = SHELVES.index(page.shelf) if page.shelf in SHELVES else len(SHELVES)
        path = page.file.relative_to(root).as_posix()
        return shelf, order.index(path) if path in order else len(order)

    return tuple(sorted(listed, key=position))


def _title(file: Path) -> str:
    with file.open(encoding="utf-8") as lines:
        return next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), file.stem)


def page(topic: str) -> Page:
    """Return the page of a topic: ``correct``, ``trust/correct``, ``docs/trust/correct.md`` or an operator.

    Raise :class:`WeftError` with the nearest topics if there is none.
    """
    name = topic.removeprefix("docs/").removesuffix(".md")
    shelf, _, stem = name.rpartition("/")
    for candidate in pages():
        if candidate.topic == stem and shelf in ("", candidate.shelf):
            return candidate
    if topic in registry.REGISTRY:
        file = PACKAGE / "ops" / registry.entry(topic).package / "README.md"
        return Page(topic=topic, shelf="ops", title=_title(file), summary="", file=file)
    raise unknown_name("topic", topic, [p.topic for p in pages()])
