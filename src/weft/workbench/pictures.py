"""Pictures: curves over an axis as one SVG, whose sentence beneath says what to see in it.

Thin over matplotlib, which is imported when a picture is drawn and not before. The file is the same
bits each time: no date, a fixed salt for its ids, none of the user's own matplotlib settings. Text
stays text, so that a picture can be searched. Colours are Okabe and Ito's, which the colour-blind
can tell apart; curves differ in dashes, and points in shape, as well.
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

WIDTH, HEIGHT = 7.2, 4.6  # inches; an inch is 72 units of the SVG
WRAP = 112  # characters of a line of the sentence
# Okabe and Ito's colours, but for the yellow, which is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
UPRIGHT = ((0, (2, 2)), (0, (6, 2, 1, 2)), (0, (8, 3)), (0, (1, 3)))  # the marks' dashes
SHAPES = ("o", "s", "^", "D", "v", "P", "X")
NARROW = 4.0  # a log axis that spans less than this ratio gets evenly spaced ticks
WIDE = 1000.0  # and one that spans more has them at powers of ten alone


@dataclass(frozen=True)
class Curve:
    """One series: ``ys`` over ``xs``, as long, in the axes' units; a line or points alone."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: Literal["line", "points"] = "line"


@dataclass(frozen=True)
class Mark:
    """A vertical line at one place of the x axis, with what it stands for."""

    at: float
    label: str


def draw(
    path: Path,
    curves: Iterable[Curve],
    *,
    title: str,
    x: str,
    y: str,
    says: str,
    log_x: bool = False,
    log_y: bool = False,
    marks: Iterable[Mark] = (),
) -> None:
    """Draw the curves, in their order, as the SVG ``path``; its folder is made.

    ``x`` and ``y`` name the axes with their units (``time of a step (ms)``), and ``says`` is the
    sentence beneath. Raises :class:`WeftError` where one of these is empty, where there is no
    curve, where values are not finite, or not positive on a log axis, and where matplotlib is
    missing.
    """
    curves, marks = list(curves), list(marks)
    _validate(path, curves, marks, {"title": title, "x": x, "y": y, "says": says}, log_x, log_y)
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise WeftError(
            "a picture is drawn with matplotlib", got=str(error), hint="pip install 'weft[plots]'"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("svg", fonttype="none", hashsalt="weft")
        matplotlib.rc("text", parse_math=False)
        figure = Figure(figsize=(WIDTH, HEIGHT), facecolor="white", layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        _curves(axes, curves)
        _marks(axes, marks)
        at_x = [v for c in curves for v in c.xs] + [m.at for m in marks]
        _scale(axes, "x", at_x, log_x)
        _scale(axes, "y", [v for c in curves for v in c.ys], log_y)
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(fontsize=8.5, framealpha=0.9)
        beneath = textwrap.fill(says, WRAP)
        figure.supxlabel(beneath, fontsize=8.5, color="#333333", x=0.02, ha="left")
        about = {"Date": None, "Creator": "Weft", "Title": title, "Description": says}
        figure.savefig(path, format="svg", metadata=about)


def _validate(
    path: Path,
    curves: Sequence[Curve],
    marks: Sequence[Mark],
    texts: dict[str, str],
    log_x: bool,
    log_y: bool,
) -> None:
    if path.suffix != ".svg":
        raise WeftError("a picture's file", expected="a name that ends in .svg", got=path.name)
    for word, text in texts.items():
        if not text.strip():
            raise WeftError(
                f"a picture's {word}", expected="words, and of an axis its unit", got=""
            )
    if not curves:
        raise WeftError("a picture", expected="at least one curve", got="none")
    for curve in curves:
        if len(curve.xs) != len(curve.ys) or not len(curve.xs):
            got = f"{len(curve.xs)} xs and {len(curve.ys)} ys"
            raise WeftError(f"the curve {curve.label!r}", expected="as many xs as ys", got=got)
        _numbers(f"the xs of {curve.label!r}", curve.xs, log_x)
        _numbers(f"the ys of {curve.label!r}", curve.ys, log_y)
    for mark in marks:
        _numbers(f"the mark {mark.label!r}", [mark.at], log_x)


def _numbers(what: str, values: Sequence[float], log: bool) -> None:
    for value in values:
        if not math.isfinite(value) or (log and value <= 0):
            expected = "positive numbers, on a log axis" if log else "finite numbers"
            raise WeftError(what, expected=expected, got=value)


def _curves(axes: Axes, curves: Sequence[Curve]) -> None:
    dashes, shapes = cycle(DASHES), cycle(SHAPES)
    for curve, colour in zip(curves, cycle(COLOURS), strict=False):
        looks: dict[str, Any] = {"linestyle": "none", "marker": next(shapes), "markersize": 5.5}
        if curve.style == "line":
            looks = {"linestyle": next(dashes), "linewidth": 1.8}
        axes.plot(list(curve.xs), list(curve.ys), color=colour, label=curve.label, **looks)


def _marks(axes: Axes, marks: Sequence[Mark]) -> None:
    for mark, dash in zip(marks, cycle(UPRIGHT), strict=False):
        axes.axvline(mark.at, color="#555555", linestyle=dash, linewidth=1.2, label=mark.label)


def _scale(axes: Axes, which: str, values: Sequence[float], log: bool) -> None:
    """Linear or log, with ticks that read 2k and 5M, since powers would need mathematics' type."""
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
    """A tick's label: 0.05, 2k, 5M, 1.5G; the unit is the axis's.

    >>> tick(1500.0), tick(0.1), tick(-2e9), tick(0)
    ('1.5k', '0.1', '-2G', '0')
    """
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * (1 - 1e-9):
            return f"{value / size:g}{letter}"
    return f"{value:g}"
