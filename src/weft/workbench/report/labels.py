"""Placement of text in plots, so that no label is cut and no two labels touch.

Positions in a plot are in percent, but text has a fixed size in pixels. Each text is therefore placed twice:
for a phone and for a wider screen. The style sheet shows the group that belongs to the width of the screen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from markupsafe import Markup

from weft.workbench.report import svg
from weft.workbench.report.scales import LinearAxis, LogAxis, tick_label

# Widths in pixels of one character of 12 pixel text, for the widest of the usual system fonts.
REGULAR = 7.2
BOLD = 8.4
LINE = 14  # height of a line of text in pixels
GAP = 8  # pixels between two labels

Anchor = Literal["start", "mid", "end"]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Screen:
    """Range of screen widths: its CSS class, and the least width and height of a plot there in pixels."""

    name: str
    width: float
    height: float
    lines: int  # most lines of one column label

    def interval(self, text: str, x: float, anchor: Anchor, character: float = REGULAR) -> Interval:
        """Return the left and the right end in pixels of a text that is anchored at ``x`` percent."""
        left = self.width * x / 100
        length = len(text) * character
        left -= {"start": 0.0, "mid": length / 2, "end": length}[anchor]
        return left, left + length

    def anchor(self, text: str, x: float) -> Anchor:
        """Return the anchor that keeps a text at ``x`` percent within the plot, the middle if it can."""
        left, right = self.interval(text, x, "mid")
        return "start" if left < 0 else "end" if right > self.width else "mid"


NARROW = Screen("narrow", 240, 300, 2)  # a window of 320 pixels, less the margins and the y axis
WIDE = Screen("wide", 590, 300, 3)  # a window of 700 pixels
SCREENS = (NARROW, WIDE)


def for_each_screen(layout: Callable[[Screen], Sequence[Markup]]) -> list[Markup]:
    """Return a group of elements for each screen, of which the style sheet shows one."""
    return [svg.tag("g", *layout(screen), class_=screen.name) for screen in SCREENS]


def apart(intervals: Sequence[Interval]) -> bool:
    """Return True if sorted intervals have at least ``GAP`` pixels between them."""
    return all(b[0] - a[1] >= GAP for a, b in pairwise(intervals))


def grid(x_axis: LogAxis, y_axis: LogAxis | LinearAxis, screen: Screen) -> list[Markup]:
    """Return the lines and numbers of both axes, as many as have room on the screen."""

    def x_label(value: float) -> tuple[str, float, Anchor]:
        text, x = tick_label(value), x_axis.at(value)
        return text, x, screen.anchor(text, x)

    parts: list[Markup] = []
    for value in x_axis.ticks(lambda ticks: apart([screen.interval(*x_label(t)) for t in ticks])):
        text, x, anchor = x_label(value)
        at = svg.percent(x)
        parts.append(svg.tag("line", x1=at, x2=at, y1="0%", y2="100%", class_="grid"))
        parts.append(svg.label(text, x=x, y=100, dy=18, class_=f"tick x {anchor}"))
    if isinstance(y_axis, LogAxis):
        heights = y_axis.ticks(lambda ticks: len(ticks) <= screen.height / (2 * LINE))
    else:
        heights = y_axis.ticks(6)
    for value in heights:
        height = 100 - y_axis.at(value)
        y = svg.percent(height)
        parts.append(svg.tag("line", x1="0%", x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(svg.label(tick_label(value), x=0, y=height, dx=-8, dy=4, class_="tick end"))
    return parts


def column_labels(columns: set[tuple[float, str]], screen: Screen, *, top: bool = False) -> list[Markup]:
    """Return names at the bottom or the top of the plot; ``columns`` are (x in percent, name).

    Columns share one label where their own would touch. A label with more names than the screen has lines
    gives their number only.
    """
    groups: list[list[tuple[float, str]]] = []
    for column in sorted(columns):
        groups.append([column])
        # A merged label moves and grows, so it can reach the one before it.
        while len(groups) > 1 and not apart([_extent(group, screen) for group in groups[-2:]]):
            last = groups.pop()
            groups[-1] += last
    if len(groups) == 1 and len({name for _, name in columns}) > screen.lines:
        return []  # one number for all columns tells nothing
    labels = []
    for group in groups:
        x, lines = _column(group, screen)
        anchor = screen.anchor(max(lines, key=len), x)
        for line, name in enumerate(lines if top else reversed(lines)):
            y, dy = (0, LINE - 1 + 13 * line) if top else (100, -8 - 13 * line)
            labels.append(svg.label(name, x=x, y=y, dy=dy, class_=f"column {anchor}"))
    return labels


def _column(group: list[tuple[float, str]], screen: Screen) -> tuple[float, list[str]]:
    """Return the position of a group's label in percent, and its lines."""
    names = list(dict.fromkeys(name for _, name in group))
    lines = names if len(names) <= screen.lines else [f"{len(names)} operators"]
    return sum(x for x, _ in group) / len(group), lines


def _extent(group: list[tuple[float, str]], screen: Screen) -> Interval:
    x, lines = _column(group, screen)
    longest = max(lines, key=len)
    return screen.interval(longest, x, screen.anchor(longest, x))
