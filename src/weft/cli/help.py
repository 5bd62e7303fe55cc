"""``weft help``: list the pages of the documentation, or show one in the terminal."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import output
from weft.cli.options import Json

if TYPE_CHECKING:
    from weft.workbench.pages import Page

EPILOG = """Examples:
  weft help
  weft help correct
  weft help softmax > softmax.md

Options of a command: weft check --help"""

WIDTH = 80  # columns of the list


def help(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC", help="Page, operator or command [default: list the pages]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the pages of the documentation, or show one.

    A page is formatted and paged on a terminal; in a pipe it is Markdown. Where a page and a command have one
    name, the page is shown; weft COMMAND --help shows the options.
    """
    from weft.cli import COMMANDS, app
    from weft.workbench import pages

    if topic in COMMANDS and topic not in {p.topic for p in pages.pages()}:
        app([str(topic), "--help"], prog_name="weft", standalone_mode=False)
    elif topic is not None:
        _show(pages.page(topic), as_json)
    elif as_json:
        print(json.dumps([_to_json(p) for p in pages.pages()]))
    else:
        _list(pages.pages())


def _to_json(page: Page) -> dict[str, str]:
    return {"topic": page.topic, "shelf": page.shelf, "title": page.title, "summary": page.summary}


def _list(pages: tuple[Page, ...]) -> None:
    """Print the topics, grouped by shelf."""
    width = max(len(p.topic) for p in pages)
    shelf = None
    for page in pages:
        if page.shelf != shelf:
            print(page.shelf or "other")
            shelf = page.shelf
        first, *rest = output.fold(page.summary or page.title, WIDTH - width - 4)
        print(f"  {page.topic:{width}}  {first}")
        for line in rest:
            print(f"{'':{width + 4}}{line}")
    print("\nShow one: weft help TOPIC. An operator or a command is a topic too.")


def _show(page: Page, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**_to_json(page), "text": page.text()}))
        return
    stdout = output.console()
    if not stdout.is_terminal:
        print(page.text(), end="")
        return
    from rich.markdown import Markdown

    os.environ.setdefault("LESS", "-RFX")  # colours in less, and no paging of what fits on the screen
    with stdout.pager(styles=not stdout.no_color):
        stdout.print(Markdown(page.text(), hyperlinks=False))
