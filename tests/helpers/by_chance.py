"""Real times on a machine whose other work no test controls.

A comparison of times may go against a right candidate by chance: another process, or a virtual machine
that was not scheduled. It must not do so again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from weft.workbench.timing.plan import is_by_time_alone

TRIES = 3
T = TypeVar("T")


def repeat(run: Callable[[], T], flags: Callable[[T], Iterable[str]]) -> T:
    """Return the first result that no comparison of times speaks against, or the last of ``TRIES``."""
    result = run()
    for _ in range(TRIES - 1):
        if not any(map(is_by_time_alone, flags(result))):
            break
        result = run()
    return result
