"""Render curves and points over labelled axes as one SVG file with a caption, using matplotlib.

matplotlib is imported only when a plot is rendered. The file is reproducible to the bit: it has no date, a
fixed salt for ids, and ignores the user's matplotlib settings. Text stays text, so a plot can be searched.
The colours are those of Okabe and Ito, which colour-blind readers can tell apart; lines also differ in
dashes, and points in shape.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.core import WeftError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.transforms import Bbox

WIDTH, HEIGHT = 7.2, 4.6  # inches; an inch is 72 units of the SVG
LEGEND_SIZE, LEGEND_ROW = 8.5, 0.18  # points; inches that a row of the legend adds above the axes
WRAP = 112  # characters of a line of the caption
# Okabe and Ito's colours without yellow, which is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
MARK_DASHES = ((0, (2, 2)), (0, (6, 2, 1, 2)), (0, (8, 3)), (0, (1, 3)))
SHAPES = ("o", "s", "^", "D", "v", "P", "X")
NARROW = 4.0  # a log axis that spans less than this ratio has evenly spaced ticks
WIDE = 1000.0  # a log axis that spans more than this ratio has ticks at powers of ten only


@dataclass(frozen=True)
class Curve:
    """Series of values: ``ys`` over ``xs`` in the axes' units, as a line or as points."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: Literal["line", "points"] = "line"


@dataclass(frozen=True)
class Mark:
    """Vertical line at the x value ``at``, with its label."""

    at: float
    label: str


def render_curves(
    path: Path,
    curves: Iterable[Curve],
    *,
    title: str,
    x: str,
    y: str,
    caption: str,
    log_x: bool = False,
    log_y: bool = False,
    marks: Iterable[Mark] = (),
) -> None:
    """Write the curves, in their order, to the SVG file ``path``; create its folder if necessary.

    ``x`` and ``y`` name the axes with their units (``time of a step (ms)``); ``caption`` is the sentence
    below the plot and says what to see in it.

    Raises :class:`WeftError` if one of these texts is empty, if there is no curve, if a value is not finite
    (or not positive on a log axis), and if matplotlib is missing.
    """
    curves, marks = list(curves), list(marks)
    _validate(path, curves, marks, {"title": title, "x": x, "y": y, "caption": caption}, log_x, log_y)
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise WeftError("plots need matplotlib", got=str(error), hint="pip install 'weft[plots]'") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's settings; rc_context restores them afterwards
        matplotlib.rc("svg", fonttype="none", hashsalt="weft")
        matplotlib.rc("text", parse_math=False)  # a dollar sign in a name is not a formula
        figure = Figure(figsize=(WIDTH, HEIGHT), facecolor="white", layout="constrained")
        # Without pyplot, which keeps figures alive and chooses a backend by the display.
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        lines = _plot(axes, curves, marks)
        xs = [v for c in curves for v in c.xs] + [m.at for m in marks]
        _set_scale(axes, "x", xs, log_x)
        _set_scale(axes, "y", [v for c in curves for v in c.ys], log_y)
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)  # the grid lies behind the curves
        _place_legend(figure, axes, lines)
        figure.supxlabel(textwrap.fill(caption, WRAP), fontsize=8.5, color="#333333", x=0.02, ha="left")
        metadata = {"Date": None, "Creator": "Weft", "Title": title, "Description": caption}
        figure.savefig(path, format="svg", metadata=metadata)


def _place_legend(figure: Figure, axes: Axes, lines: Sequence[Line2D]) -> None:
    """Place the legend within the axes, or above them in a taller figure if it would hide a curve."""
    legend = axes.legend(fontsize=LEGEND_SIZE, framealpha=0.9)
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    if not any(_is_hidden(line, axes, box) for line in lines):
        return
    legend.remove()
    handles, labels = axes.get_legend_handles_labels()
    figure.set_size_inches(WIDTH, HEIGHT + LEGEND_ROW * -(-len(labels) // 2))
    figure.legend(handles, labels, loc="outside upper left", ncols=2, fontsize=LEGEND_SIZE, frameon=False)


def _is_hidden(line: Line2D, axes: Axes, box: Bbox) -> bool:
    """Return whether a point of a curve, or a stretch of its line, lies within the box (in pixels)."""
    path = line.get_path().transformed(axes.transData)
    if line.get_linestyle() == "None":
        return bool(box.count_contains(path.vertices))
    return bool(path.intersects_bbox(box, filled=False))


def _validate(
    path: Path,
    curves: Sequence[Curve],
    marks: Sequence[Mark],
    texts: dict[str, str],
    log_x: bool,
    log_y: bool,
) -> None:
    if path.suffix != ".svg":
        raise WeftError("file of a plot", expected="a name that ends in .svg", got=path.name)
    for name, text in texts.items():
        if not text.strip():
            raise WeftError(f"{name} of a plot", expected="text; for an axis also its unit", got="")
    if not curves:
        raise WeftError("plot", expected="at least one curve", got="none")
    for curve in curves:
        if len(curve.xs) != len(curve.ys) or not len(curve.xs):
            got = f"{len(curve.xs)} xs and {len(curve.ys)} ys"
            raise WeftError(f"curve {curve.label!r}", expected="as many xs as ys", got=got)
        _check_numbers(f"xs of {curve.label!r}", curve.xs, log_x)
        _check_numbers(f"ys of {curve.label!r}", curve.ys, log_y)
    for mark in marks:
        _check_numbers(f"mark {mark.label!r}", [mark.at], log_x)


def _check_numbers(name: str, values: Sequence[float], log: bool) -> None:
    for value in values:
        if not math.isfinite(value) or (log and value <= 0):
            expected = "positive numbers on a log axis" if log else "finite numbers"
            raise WeftError(name, expected=expected, got=value)


def _plot(axes: Axes, curves: Sequence[Curve], marks: Sequence[Mark]) -> list[Line2D]:
    """Draw the curves and the marks; return the curves' lines."""
    lines: list[Line2D] = []
    dashes, shapes = cycle(DASHES), cycle(SHAPES)
    for curve, colour in zip(curves, cycle(COLOURS), strict=False):
        style: dict[str, Any] = {"linestyle": "none", "marker": next(shapes), "markersize": 5.5}
        if curve.style == "line":
            style = {"linestyle": next(dashes), "linewidth": 1.8}
        lines += axes.plot(list(curve.xs), list(curve.ys), color=colour, label=curve.label, **style)
    for mark, dash in zip(marks, cycle(MARK_DASHES), strict=False):
        axes.axvline(mark.at, color="#555555", linestyle=dash, linewidth=1.2, label=mark.label)
    return lines


def _set_scale(axes: Axes, which: str, values: Sequence[float], log: bool) -> None:
    """Set the scale of one axis, with ticks like 2k and 5M: powers of ten need math text."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis = getattr(axes, f"{which}axis")
    if log:
        getattr(axes, f"set_{which}scale")("log")
        ratio = max(values) / min(values)
        steps = (1.0,) if ratio > WIDE else (1.0, 2.0, 5.0)
        axis.set_major_locator(MaxNLocator(6) if ratio < NARROW else LogLocator(subs=steps))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))


def tick(value: float) -> str:
    """Return the label of a tick: 0.05, 2k, 5M, 1.5G; its unit is the axis's.

    >>> tick(1500.0), tick(0.1), tick(-2e9), tick(0)
    ('1.5k', '0.1', '-2G', '0')
    """
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # A tick at 1000 can be computed as 999.9999999999.
        if abs(value) >= size * (1 - 1e-9):
            return f"{value / size:g}{prefix}"
    return f"{value:g}"
