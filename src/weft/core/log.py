"""The log callback: a function that long work calls with one line of text for each step."""

from __future__ import annotations

from collections.abc import Callable

Log = Callable[[str], None]


def no_log(line: str) -> None:
    """Discard the line: the default where nobody reads the log."""
