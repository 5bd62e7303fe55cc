"""A picture of a measured hierarchy: latency over working set, with what was found marked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.core import WeftError
from weft.workbench.hierarchy.result import LATENCY
from weft.workbench.hierarchy.show import size
from weft.workbench.pictures import Curve, Mark, draw

SHARED = "shared"  # no line of its own: its chase is flat to the end, which is where it stops


def latency(said: Mapping[str, Any], path: Path) -> None:
    """Draw every latency of a record, in ns, as the SVG ``path``; plateaus as points on the curves.

    Raises :class:`WeftError` where the record has no latency, or matplotlib is missing.
    """
    curves = [s for s in said["series"] if s["kind"] == LATENCY]
    if not curves:
        raise WeftError("a picture of a hierarchy", expected="a latency", got="none")
    drawn = []
    for one in curves:
        ns = one.get("ns") or one["values"]
        drawn.append(Curve(one["label"], one["sizes"], ns))
    flats = [(one, flat) for one in curves for flat in one["plateaus"]]
    if flats:
        middles = [(flat["first"] * flat["last"]) ** 0.5 for _, flat in flats]
        values = [flat.get("ns", flat["value"]) for _, flat in flats]
        drawn.append(Curve("a plateau that was found", middles, values, "points"))
    marks = [
        Mark(nbytes, f"{level}, known as {size(nbytes)}")
        for level, nbytes in said["known"].items()
        if level != SHARED and nbytes < 2 * max(max(c.xs) for c in drawn)
    ]
    draw(
        path,
        drawn,
        title=f"Latency by working set: {said['device']['name']}",
        x="working set (bytes)",
        y="latency of a load (ns)",
        says=sentence(said),
        log_x=True,
        log_y=True,
        marks=marks,
    )


def sentence(said: Mapping[str, Any]) -> str:
    """What to see in the picture, from what was found."""
    steps = "Each curve is flat while a level holds the set, and rises where the set outgrows it"
    found = [
        f"{h['level']} at {size(h['leaves'])} of {size(h['known'])}"
        for s in said["series"]
        if s["kind"] == LATENCY
        for h in s["held"]
        if h["within"]
    ]
    told = dict.fromkeys(found)
    return f"{steps}: {'; '.join(told)}." if told else f"{steps}, near the vertical lines."
