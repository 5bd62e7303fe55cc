"""Flame graph as one SVG file: the lanes of a folded trace, each with its root on top, equally wide.

The width of a frame is its time with all that it called. Frames with the same name under the same caller
are merged and ordered by size, so left and right do not mean before and after. The file loads nothing.
Without its script it is still readable, since the title of each frame has its name, time and share; with
the script a click zooms, the arrow keys move, and a search adds up the matching frames.
"""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources

from markupsafe import Markup

from weft.workbench.explain.profile.stacks import DEVICE, IDLE, NO_OPERATOR, ROOT, Folded, Lane, Stack
from weft.workbench.report import scales
from weft.workbench.report.svg import tag

WIDTH = 1200  # units; pixels if the window is wide enough
ROW = 19
THIN = 22  # a narrower frame cannot show its name
NARROWEST = 0.25  # narrower frames are drawn as one
TICKS = 4
_COLOURS = 6
_IDLE_NAMES = (NO_OPERATOR, IDLE)


@dataclass
class _Frame:
    """Frame of the graph; ``ns`` is its time with all frames beneath it."""

    name: str
    ns: int = 0
    children: dict[str, _Frame] = field(default_factory=dict)

    def add(self, stack: Stack, ns: int) -> None:
        """Add a stack's time beneath this frame."""
        # A loop, since stacks of Python can be deeper than the recursion limit.
        frame = self
        frame.ns += ns
        for name in stack:
            if (child := frame.children.get(name)) is None:
                child = frame.children[name] = _Frame(_printable(name))
            frame = child
            frame.ns += ns


def svg(folded: Folded, *, title: str, description: str) -> str:
    """Return the graph as SVG text; ``description`` is a sentence that says what it shows.

    ``folded.root_ns`` is the width of every lane and of the drawing.
    """
    # Below the title, the subtitle and the line with the result of a search.
    y = 62
    lanes = []
    for lane in folded.lanes:
        group, height = _lane(lane, folded, y)
        lanes.append(group)
        y += height
    lines = textwrap.wrap(description, 165)
    notes = [tag("text", line, x=0, y=y + 14 + 16 * i, class_="quiet") for i, line in enumerate(lines)]
    height = y + 24 + 16 * len(lines)
    return str(
        tag(
            "svg",
            tag("title", title),
            tag("desc", description),
            tag("style", Markup(_resource("flame.css"))),
            tag("text", title, x=0, y=22, class_="title"),
            tag("text", _subtitle(folded), x=0, y=42, class_="quiet"),
            _search(),
            *lanes,
            *notes,
            # SVG is XML: in CDATA the script needs no escapes. To JavaScript the marks are comments.
            tag("script", Markup("//<![CDATA[\n{}//]]>").format(Markup(_resource("flame.js")))),
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
    step = scales.time(folded.root_us / folded.steps)
    return f"wall time {wall} in {folded.steps} steps, {step} each"


def _search() -> Markup:
    """Return the search field, visible only with the script, and the text for its result."""
    box = tag(
        "input",
        xmlns="http://www.w3.org/1999/xhtml",
        type="search",
        placeholder="search",
        aria_label="search frames by name",
    )
    field_object = tag("foreignObject", box, x=WIDTH - 220, y=6, width=220, height=28, class_="scripted")
    result = tag("text", x=WIDTH, y=52, text_anchor="end", class_="matches quiet", aria_live="polite")
    return field_object + result


def _lane(lane: Lane, folded: Folded, top: int) -> tuple[Markup, int]:
    """Return one lane with its heading and axis, and its height."""
    root = _Frame(ROOT)
    for stack, ns in lane.stacks.items():
        root.add(stack, ns)
    frames = list(_visible_frames(root, folded.root_ns))
    depth = 1 + max(depth for _, _, depth in frames)
    y = top + 18
    nested = [_frame(f, at, row, y, lane, folded.root_ns) for f, at, row in frames]
    bottom = y + depth * ROW
    group = tag(
        "g",
        tag("text", _heading(lane, folded), x=0, y=top + 11, class_="lane"),
        *nested,
        _axis(folded.root_ns, bottom),
        class_="frames",
        role="group",
        aria_label=_heading(lane, folded),
        data_lane=lane.name,
    )
    # 46: the ticks, two lines of text, and the gap to the next lane.
    return group, bottom + 46 - top


def _heading(lane: Lane, folded: Folded) -> str:
    idle = sum(lane.stacks.get((name,), 0) for name in _IDLE_NAMES)
    busy = scales.share(1 - idle / folded.root_ns)
    activity = "at work" if lane.kind == DEVICE else "in operators"
    parts = [f"{lane.name}: {activity} {busy} of the wall time"]
    if lane.shared:
        overlap = scales.time(lane.shared / 1e3)
        parts.append(f"several streams at once for {overlap}, shared evenly")
    if lane.outside:
        parts.append(f"{scales.time(lane.outside / 1e3)} more ran outside the steps, not drawn")
    return "; ".join(parts)


def _visible_frames(root: _Frame, wall: int) -> Iterator[tuple[_Frame, int, int]]:
    """Yield every frame that is drawn, with the ns at its left side and its row.

    The widest child comes first and idle time last. Children too narrow to see are drawn as one frame, so
    that the widths still add up.
    """
    stack = [(root, 0, 0)]
    while stack:
        frame, at, row = stack.pop()
        yield frame, at, row
        children = sorted(frame.children.values(), key=lambda f: (f.name in _IDLE_NAMES, -f.ns, f.name))
        wide = [f for f in children if f.ns / wall * WIDTH >= NARROWEST]
        if narrow := [f for f in children if f.ns / wall * WIDTH < NARROWEST]:
            wide.append(_Frame(f"({len(narrow)} narrower)", sum(f.ns for f in narrow)))
        for child in wide:
            stack.append((child, at, row + 1))
            at += child.ns


def _frame(frame: _Frame, at: int, row: int, top: int, lane: Lane, wall: int) -> Markup:
    """Return a frame as a nested SVG, which clips its name at the border."""
    width = frame.ns / wall * WIDTH
    self_ns = frame.ns - sum(f.ns for f in frame.children.values())
    label = f"{frame.name}, {scales.time(frame.ns / 1e3)}, {scales.share(frame.ns / wall)}"
    if 0 < self_ns < frame.ns:
        label += f", itself {scales.time(self_ns / 1e3)}"
    return tag(
        "svg",
        tag("title", label),
        tag("rect", width="100%", height="100%"),
        tag("text", frame.name, x=4, y=13),
        x=at / wall * WIDTH,
        y=top + row * ROW,
        width=width,
        height=ROW,
        class_=f"frame {_colour(frame.name, row, lane)}" + (" thin" if width < THIN else ""),
        role="button",
        aria_label=label,
        # Only the roots are stops of the Tab key, not thousands of frames; arrow keys go on from there.
        tabindex=-1 if row else 0,
        data_at=at,
        data_ns=frame.ns,
        data_depth=row,
        data_name=frame.name,
    )


def _colour(name: str, row: int, lane: Lane) -> str:
    """Return the CSS class: warm for the host, cool for a GPU; a name always has the same shade."""
    if not row:
        return "root"
    # Names that stand for no operator: idle time, an unknown launch, frames drawn as one.
    if name.startswith("("):
        return "none"
    # hash() differs between processes, crc32 does not.
    shade = zlib.crc32(name.encode(errors="replace")) % _COLOURS
    return f"{'d' if lane.kind == DEVICE else 'c'}{shade}"


def _axis(wall: int, y: int) -> Markup:
    """Return the axis: the time from the left side at quarters of the width, and a caption."""
    parts = []
    for i in range(TICKS + 1):
        x, share = WIDTH * i / TICKS, i / TICKS
        anchor = "start" if not i else "end" if i == TICKS else "middle"
        # Half a unit inside: otherwise the border clips half of the outermost lines.
        inner = min(max(x, 0.5), WIDTH - 0.5)
        parts.append(tag("line", x1=inner, x2=inner, y1=y + 2, y2=y + 7))
        label = scales.time(wall * share / 1e3) if i else "0 ns"
        parts.append(tag("text", label, x=x, y=y + 19, text_anchor=anchor, data_share=share))
    caption = "time (a width; from left to right by size; each row is called by the one above it)"
    parts.append(tag("text", caption, x=WIDTH / 2, y=y + 34, text_anchor="middle", class_="quiet"))
    return tag("g", *parts, class_="axis")


def _printable(name: str) -> str:
    """Replace what XML cannot contain: control characters and lone surrogates."""
    return "".join(c if c.isprintable() else " " for c in name)


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
