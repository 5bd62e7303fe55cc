"""Hook of mkdocs: keep links that leave ``docs/`` working within the site.

A page links to files of the repository (``../../src/weft/ops/softmax``) as GitHub shows them. For the site
each linked file is copied to ``source/`` and shown as text; a Markdown file becomes a page; a folder leads to
its README or is left as plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCE = "source/"  # folder of the site for files from outside docs/
LINK = re.compile(r"(?<!!)\[([^\]\n]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"(!\[[^\]\n]*\])\(([^)\s]+)\)")
# A picture for each colour scheme of the system. <picture> does not follow the switch of the site.
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">'
    r'\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)
GENERATED = re.compile(r"<!-- \[\[\[(?:cog.*?\]\]\]|end\]\]\]) -->\n?", re.S)


def _target(page: File, link: str) -> Path | None:
    """Return the repository file that a link names; None for the web, and for what mkdocs resolves itself."""
    if re.match(r"[a-z]+:", link) or link.startswith("#"):
        return None
    path = (_source(page).parent / link).resolve()
    resolved_by_mkdocs = path.is_relative_to(DOCS) and not page.src_uri.startswith(SOURCE)
    if resolved_by_mkdocs or not path.is_relative_to(ROOT) or not path.exists():
        return None
    return path.relative_to(ROOT)


def _source(page: File) -> Path:
    """Return the path of a page in the repository."""
    if page.src_uri.startswith(SOURCE):
        return ROOT / page.src_uri.removeprefix(SOURCE)
    return DOCS / page.src_uri


def _site_uri(path: Path) -> str | None:
    """Return where a repository file is within the site; None for a folder without a README."""
    if (ROOT / path).is_relative_to(DOCS):
        return (ROOT / path).relative_to(DOCS).as_posix()
    if (ROOT / path).is_dir():
        path = path / "README.md"
        if not (ROOT / path).exists():
            return None
    if path.suffix in (".md", ".svg", ".png"):
        return f"{SOURCE}{path.as_posix()}"
    return f"{SOURCE}{path.as_posix()}.txt"  # a browser shows it as text


def on_files(files: Any, config: Any) -> Any:
    """Add every file that a page links to, and the pages that these link to in turn."""
    pending = [f for f in files if f.is_documentation_page()]
    while pending:
        page = pending.pop()
        text = _source(page).read_text(encoding="utf-8")
        for link in [m[2] for m in LINK.finditer(text)] + [m[2] for m in IMAGE.finditer(text)]:
            path = _target(page, link)
            uri = path and _site_uri(path)
            if not uri or files.get_file_from_path(uri):
                continue
            original = ROOT / uri.removeprefix(SOURCE).removesuffix(".txt")
            added = File.generated(config, uri, content=original.read_bytes())
            files.append(added)
            if added.is_documentation_page():
                pending.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links that leave docs/ by links within the site, and drop the generators' markers.

    A picture with a dark variant becomes two images, of which the site's theme shows the one that fits.
    """

    def replace_link(match: re.Match[str]) -> str:
        path = _target(page.file, match[2])
        if path is None:
            return match[0]
        uri = _site_uri(path)
        return f"[{match[1]}]({_relative(page.file, uri)}{match[3] or ''})" if uri else match[1]

    def replace_image(match: re.Match[str]) -> str:
        path = _target(page.file, match[2])
        uri = path and _site_uri(path)
        return f"{match[1]}({_relative(page.file, uri)})" if uri else match[0]

    markdown = IMAGE.sub(replace_image, LINK.sub(replace_link, GENERATED.sub("", markdown)))
    return PICTURE.sub(r"![\2](\3#only-light)![\2](\1#only-dark)", markdown)


def _relative(page: File, uri: str) -> str:
    depth = page.src_uri.count("/")
    return "../" * depth + uri
