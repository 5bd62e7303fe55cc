"""Repeat tests of real times on a machine that other processes also use.

A comparison of times may refuse a correct candidate by chance, for example while another process runs or the
virtual machine is not scheduled. It must not do so in every repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from weft.workbench.timing.plan import is_by_time_alone

TRIES = 3
T = TypeVar("T")


def repeat(run: Callable[[], T], flags: Callable[[T], Iterable[str]]) -> T:
    """Return the first result without a flag from a comparison of times, or the last of ``TRIES`` results."""
    result = run()
    for _ in range(TRIES - 1):
        if not any(map(is_by_time_alone, flags(result))):
            break
        result = run()
    return result
