"""Text helpers that several layers share."""

from __future__ import annotations

import re
from typing import Any


def printable(text: str, keep: str = "") -> str:
    r"""Return foreign text with everything that is not a visible character escaped, except ``keep``.

    A candidate's message could otherwise clear the terminal, begin a line of its own ("all passed"), or
    reverse the text after it.

    >>> printable("boom\x1b[2K\rall passed")
    'boom\\x1b[2K\\rall passed'
    """
    if text.isprintable():  # almost always
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def printable_tree(value: Any) -> Any:
    r"""Return data from a file with all its strings as :func:`printable` returns them.

    >>> printable_tree({"name": ["a\nb", 1.5]})
    {'name': ['a\\nb', 1.5]}
    """
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_tree(v) for v in value]
    if isinstance(value, dict):
        return {printable_tree(k): printable_tree(v) for k, v in value.items()}
    return value


def slug(text: str) -> str:
    """Return ``text`` as a file name: lower case, words joined by dashes; "unknown" for an empty one.

    >>> slug("NVIDIA H200 NVL")
    'nvidia-h200-nvl'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"
