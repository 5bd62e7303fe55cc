"""The one error a user's mistake gives: what was expected, what was got, what to do."""

from __future__ import annotations


class WeftError(ValueError):
    """A call that cannot be answered as it was made; raised before anything is launched.

    The message reads ``what: expected ..., got ...; hint: ...`` and each part is kept as an
    attribute, so that a caller can show them apart.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: object | None = None,
        got: object | None = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.expected = None if expected is None else str(expected)
        self.got = None if got is None else str(got)
        self.hint = hint
        text = what
        if self.expected is not None:
            text += f": expected {self.expected}"
        if self.got is not None:
            text += f"{',' if self.expected is not None else ':'} got {self.got}"
        if hint:
            text += f"; hint: {hint}"
        super().__init__(text)
