"""``WeftError``, raised for every mistake of a user: what was expected, what was given, what to do.

``Interrupted`` is a ``KeyboardInterrupt`` with the results that are ready.
"""

from __future__ import annotations

import sys
from typing import Any

from weft.core.text import printable


def check_name(what: str, name: object) -> None:
    """Raise :class:`WeftError` unless ``name`` is a text that a terminal shows as it is."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise WeftError(f"the name of {what}", expected="visible characters", got=repr(name))


class WeftError(ValueError):
    """Error for an invalid call, raised before anything is launched.

    The message reads ``what: expected ..., got ...; hint: ...``. Each part is also an attribute, so that a
    caller can show the parts separately.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: object | None = None,
        got: object | None = None,
        hint: str | None = None,
    ) -> None:
        # Any part may quote a file or an exception of somebody else. A compiler's log has several lines.
        self.what = printable(what, keep="\n\t")
        self.expected = None if expected is None else printable(str(expected), keep="\n\t")
        self.got = None if got is None else printable(str(got), keep="\n\t")
        self.hint = None if hint is None else printable(hint, keep="\n\t")
        text = self.what
        if self.expected is not None:
            text += f": expected {self.expected}"
        if self.got is not None:
            text += f"{',' if self.expected is not None else ':'} got {self.got}"
        if self.hint:
            text += f"; hint: {self.hint}"
        super().__init__(text)


def print_error(error: WeftError) -> None:
    """Print an error to stderr as the commands do: one line, and its hint on another."""
    message, _, hint = str(error).partition("; hint: ")
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


class Interrupted(KeyboardInterrupt):
    """A ``KeyboardInterrupt`` of long work; ``partial`` is its result so far, None if there is none."""

    def __init__(self, partial: Any = None) -> None:
        self.partial = partial
        super().__init__()
