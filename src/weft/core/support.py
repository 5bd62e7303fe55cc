"""``Support``: yes, or no with a reason that a user can act on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Support:
    """Answer to whether an implementation can run, and whether its time means anything.

    ``timed`` is False if it can be checked but not timed, as a Triton kernel in Triton's interpreter;
    ``reason`` then says so.
    """

    ok: bool
    reason: str = ""
    timed: bool = True

    def __post_init__(self) -> None:
        if not (self.ok and self.timed) and not self.reason:
            raise ValueError("a refusal needs its reason")

    def __bool__(self) -> bool:
        return self.ok

    def __and__(self, other: Support) -> Support:
        """Combine two answers: yes only if both are yes; the first refusal gives the reason."""
        if not self.ok or not other.ok:
            return self if not self.ok else other
        return self if not self.timed else other


YES = Support(ok=True)


def no(reason: str) -> Support:
    """Return a refusal with its reason."""
    return Support(ok=False, reason=reason, timed=False)


def check_only(reason: str) -> Support:
    """Return support for checking only: a time measured here would mean nothing."""
    return Support(ok=True, reason=reason, timed=False)
