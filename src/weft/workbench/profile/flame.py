"""A flame graph as one SVG file: each lane of a folded trace, its root on top, all equally wide.

A frame's width is the time that it and what it called took. Frames of one name in one place are
one, and stand by size, so left and right say nothing of before and after. The file needs nothing
from outside, and reads without its script, since each frame's title has its name, time and share;
with the script a click zooms, arrows walk, and a search adds up what it finds.
"""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources

from markupsafe import Markup

from weft.workbench.profile.stacks import DEVICE, IDLE, NO_OPERATOR, ROOT, Folded, Lane, Stack
from weft.workbench.report import scales
from weft.workbench.report.svg import tag

WIDTH = 1200  # units, pixels where there is room
ROW = 19
THIN = 22  # a frame narrower than this has no room for a name
NARROWEST = 0.25  # a narrower one is not drawn by itself
TICKS = 4
_COLOURS = 6
_NOTHING = (NO_OPERATOR, IDLE)


@dataclass
class _Frame:
    """``ns`` is the time of it and all beneath it."""

    name: str
    ns: int = 0
    beneath: dict[str, _Frame] = field(default_factory=dict)

    def add(self, stack: Stack, ns: int) -> None:
        """Put a stack's time beneath this frame; with no recursion, as stacks of Python go deep."""
        at = self
        at.ns += ns
        for name in stack:
            if (below := at.beneath.get(name)) is None:
                below = at.beneath[name] = _Frame(_printable(name))
            at = below
            at.ns += ns


def svg(folded: Folded, *, title: str, says: str) -> str:
    """The picture as SVG text. ``says`` is the sentence that tells what to see in it.

    All lanes are as wide as ``folded.root_ns``, which is the drawing's width too.
    """
    y = 62
    drawn = []
    for lane in folded.lanes:
        made, height = _lane(lane, folded, y)
        drawn.append(made)
        y += height
    told = textwrap.wrap(says, 165)
    notes = [
        tag("text", line, x=0, y=y + 14 + 16 * i, class_="quiet") for i, line in enumerate(told)
    ]
    height = y + 24 + 16 * len(told)
    return str(
        tag(
            "svg",
            tag("title", title),
            tag("desc", says),
            tag("style", Markup(_beside("flame.css"))),
            tag("text", title, x=0, y=22, class_="title"),
            tag("text", _subtitle(folded), x=0, y=42, class_="quiet"),
            _search(),
            *drawn,
            *notes,
            tag("script", Markup("//<![CDATA[\n{}//]]>").format(Markup(_beside("flame.js")))),
            xmlns="http://www.w3.org/2000/svg",
            class_="flame",
            viewBox=f"0 0 {WIDTH} {height}",
            width=WIDTH,
            height=height,
            role="group",
            aria_label=title,
            data_width=WIDTH,
            data_thin=THIN,
        )
    )


def _subtitle(folded: Folded) -> str:
    wall = scales.time(folded.root_us)
    if folded.steps < 2:
        return f"wall time {wall}"
    each = scales.time(folded.root_us / folded.steps)
    return f"wall time {wall} in {folded.steps} steps, {each} each"


def _search() -> Markup:
    """A field to search in, there only where the script is; the words beside say what was found."""
    box = tag(
        "input",
        xmlns="http://www.w3.org/1999/xhtml",
        type="search",
        placeholder="search",
        aria_label="search frames by name",
    )
    held = tag("foreignObject", box, x=WIDTH - 220, y=6, width=220, height=28, class_="scripted")
    found = tag("text", x=WIDTH, y=52, text_anchor="end", class_="found quiet", aria_live="polite")
    return held + found


def _lane(lane: Lane, folded: Folded, top: int) -> tuple[Markup, int]:
    """One lane with its heading and its axis, and how high that is."""
    root = _Frame(ROOT)
    for stack, ns in lane.stacks.items():
        root.add(stack, ns)
    frames = list(_placed(root, folded.root_ns))
    depth = 1 + max(depth for _, _, depth in frames)
    y = top + 18
    nested = [_frame(f, at, row, y, lane, folded.root_ns) for f, at, row in frames]
    bottom = y + depth * ROW
    drawn = tag(
        "g",
        tag("text", _heading(lane, folded), x=0, y=top + 11, class_="lane"),
        *nested,
        _axis(folded.root_ns, bottom),
        class_="frames",
        role="group",
        aria_label=_heading(lane, folded),
        data_lane=lane.name,
    )
    return drawn, bottom + 46 - top


def _heading(lane: Lane, folded: Folded) -> str:
    nothing = sum(lane.stacks.get((name,), 0) for name in (NO_OPERATOR, IDLE))
    busy = scales.share(1 - nothing / folded.root_ns)
    at = "at work" if lane.kind == DEVICE else "in operators"
    told = [f"{lane.name}: {at} {busy} of the wall time"]
    if lane.shared:
        both = scales.time(lane.shared / 1e3)
        told.append(f"several streams at once for {both}, shared evenly")
    if lane.outside:
        told.append(f"{scales.time(lane.outside / 1e3)} more ran outside the steps, not drawn")
    return "; ".join(told)


def _placed(root: _Frame, wall: int) -> Iterator[tuple[_Frame, int, int]]:
    """Every frame that is drawn, with the ns at its left side and its row.

    The widest stands first, idle time last. What would be narrower than a hair is drawn as one
    frame, so that no time is lost.
    """
    waiting = [(root, 0, 0)]
    while waiting:
        frame, at, row = waiting.pop()
        yield frame, at, row
        beneath = sorted(frame.beneath.values(), key=lambda f: (f.name in _NOTHING, -f.ns, f.name))
        wide = [f for f in beneath if f.ns / wall * WIDTH >= NARROWEST]
        if narrow := [f for f in beneath if f.ns / wall * WIDTH < NARROWEST]:
            wide.append(_Frame(f"({len(narrow)} narrower)", sum(f.ns for f in narrow)))
        for one in wide:
            waiting.append((one, at, row + 1))
            at += one.ns


def _frame(frame: _Frame, at: int, row: int, top: int, lane: Lane, wall: int) -> Markup:
    """A nested SVG, which cuts the name at the frame's side."""
    width = frame.ns / wall * WIDTH
    own = frame.ns - sum(f.ns for f in frame.beneath.values())
    told = f"{frame.name}, {scales.time(frame.ns / 1e3)}, {scales.share(frame.ns / wall)}"
    if 0 < own < frame.ns:
        told += f", itself {scales.time(own / 1e3)}"
    return tag(
        "svg",
        tag("title", told),
        tag("rect", width="100%", height="100%"),
        tag("text", frame.name, x=4, y=13),
        x=at / wall * WIDTH,
        y=top + row * ROW,
        width=width,
        height=ROW,
        class_=f"frame {_colour(frame.name, row, lane)}" + (" thin" if width < THIN else ""),
        role="button",
        aria_label=told,
        tabindex=-1 if row else 0,
        data_at=at,
        data_ns=frame.ns,
        data_depth=row,
        data_name=frame.name,
    )


def _colour(name: str, row: int, lane: Lane) -> str:
    """Warm for the host, cool for a GPU; the same name always has the same shade."""
    if not row:
        return "root"
    if name.startswith("("):
        return "none"
    shade = zlib.crc32(name.encode(errors="replace")) % _COLOURS
    return f"{'d' if lane.kind == DEVICE else 'c'}{shade}"


def _axis(wall: int, y: int) -> Markup:
    """The time from the left side to quarters of the width, and what the axis is."""
    parts = []
    for i in range(TICKS + 1):
        x, share = WIDTH * i / TICKS, i / TICKS
        anchor = "start" if not i else "end" if i == TICKS else "middle"
        inner = min(max(x, 0.5), WIDTH - 0.5)
        parts.append(tag("line", x1=inner, x2=inner, y1=y + 2, y2=y + 7))
        label = scales.time(wall * share / 1e3) if i else "0 ns"
        parts.append(tag("text", label, x=x, y=y + 19, text_anchor=anchor, data_share=share))
    told = "time (a width; from left to right by size; each row is called by the one above it)"
    parts.append(tag("text", told, x=WIDTH / 2, y=y + 34, text_anchor="middle", class_="quiet"))
    return tag("g", *parts, class_="axis")


def _printable(name: str) -> str:
    """The name without what XML cannot hold: control characters and halves of pairs."""
    return "".join(c if c.isprintable() else " " for c in name)


def _beside(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
