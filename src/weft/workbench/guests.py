"""Guests at a point: the processes of strangers, started anew, and not believed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.core import Implementation
from weft.workbench.cell import CellDied, GuestError
from weft.workbench.hands import Guest
from weft.workbench.points import Point


def without_their_baseline(
    point: Point, guests: Mapping[str, Guest], given: Mapping[str, Implementation]
) -> Point:
    """The point, where a stranger's implementation does not set the tolerance by being named like
    the one that does; ``given`` are those that the judge's process may call."""
    baseline = point.baseline
    if baseline is None or baseline.name not in guests or baseline in given.values():
        return point
    return replace(point, baseline=None)


def restart(point: Point, guests: Mapping[str, Guest]) -> dict[str, str]:
    """Start the point's guests anew, each once; why, by name, where one could not be."""
    broken: dict[str, str] = {}
    done: dict[int, str] = {}
    for name in (i.name for i in point.implementations if i.name in guests):
        guest = guests[name]
        if id(guest) not in done:
            done[id(guest)] = ""
            try:
                guest.restart()
            except (CellDied, GuestError) as error:
                done[id(guest)] = str(error)
        if done[id(guest)]:
            broken[name] = done[id(guest)]
    return broken
