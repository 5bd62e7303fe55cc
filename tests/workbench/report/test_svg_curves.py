"""Plots of curves: their text, reproducible bits, refused input, and colours for colour-blind readers."""

from __future__ import annotations

import doctest
import sys
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from weft.core import WeftError
from weft.workbench.report import svg_curves
from weft.workbench.report.svg_curves import COLOURS, HEIGHT, Curve, Mark, render_curves

TEXTS: dict[str, Any] = {
    "title": "Copy over size",
    "x": "size (bytes)",
    "y": "bandwidth (GB/s)",
    "caption": "Bandwidth rises with size & stays under the ceiling < 5 TB/s, whatever $dtype$ it is.",
}
LINE = Curve("measured", [1, 10, 100, 5000], [2.0, 30.0, 250.0, 300.0])
POINTS = Curve("seen $2", [1, 100], [5, 50], style="points")


def texts(path: Path) -> str:
    root = ElementTree.parse(path).getroot()
    return " ".join("".join(t.itertext()) for t in root.iter("{http://www.w3.org/2000/svg}text"))


def test_plot_shows_all_texts(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.svg"
    render_curves(path, [LINE, POINTS], **TEXTS, log_x=True, log_y=True, marks=[Mark(70, "cache size")])
    shown = texts(path)
    for text in (*TEXTS.values(), "measured", "seen $2", "cache size", "1k", "100"):
        assert all(part in shown for part in text.split()), text


def test_doctest_of_tick_labels() -> None:
    assert doctest.testmod(svg_curves).attempted == 1 and not doctest.testmod(svg_curves).failed


def test_same_bits_under_any_matplotlib_settings(tmp_path: Path) -> None:
    import matplotlib

    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    render_curves(first, [LINE, POINTS], **TEXTS)
    with matplotlib.rc_context({"lines.linewidth": 9.0, "figure.facecolor": "red"}):
        render_curves(second, (c for c in (LINE, POINTS)), **TEXTS)
        assert matplotlib.rcParams["lines.linewidth"] == 9.0
    assert first.read_bytes() == second.read_bytes()
    other = Curve("measured", [1, 10, 100, 5000], [2.0, 30.0, 250.0, 301.0])
    render_curves(second, [other, POINTS], **TEXTS)
    assert first.read_bytes() != second.read_bytes()


@pytest.mark.parametrize(
    ("curves", "change"),
    [
        *(([LINE], {name: " "}) for name in TEXTS),
        ([], {}),
        ([Curve("short", [1, 2], [1])], {}),
        ([Curve("empty", [], [])], {}),
        ([Curve("nan", [1], [float("nan")])], {}),
        ([Curve("zero", [0, 1], [1, 2])], {"log_x": True}),
        ([Curve("minus", [1, 2], [-1, 2])], {"log_y": True}),
        ([LINE], {"log_x": True, "marks": [Mark(0, "nowhere")]}),
    ],
)
def test_invalid_input_is_refused(curves: list[Curve], change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(WeftError):
        render_curves(tmp_path / "a.svg", curves, **{**TEXTS, **change})
    assert not (tmp_path / "a.svg").exists()


def test_without_matplotlib_the_hint_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(WeftError, match=r"pip install 'weft\[plots\]'"):
        render_curves(tmp_path / "a.svg", [LINE], **TEXTS)
    with pytest.raises(WeftError, match=r"\.svg"):
        render_curves(tmp_path / "a.png", [LINE], **TEXTS)


# Linear RGB as seen without red cones (protan) and without green cones (deutan); Viénot, Brettel and Mollon,
# 1999.
DICHROMAT = {
    "protan": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
    "deutan": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
}


@pytest.mark.parametrize("eye", DICHROMAT)
def test_colours_differ_for_colour_blind_readers(eye: str) -> None:
    def seen(colour: str) -> tuple[float, ...]:
        light = [(int(colour[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]
        mixed = [sum(w * c for w, c in zip(row, light, strict=True)) for row in DICHROMAT[eye]]
        return tuple(max(0.0, m) ** (1 / 2.2) for m in mixed)

    for one, other in combinations(COLOURS[:5], 2):  # the first five: more curves are rare
        distance = max(abs(a - b) for a, b in zip(seen(one), seen(other), strict=True))
        assert distance > 0.1, f"{one} and {other} look alike"


def test_a_legend_that_would_hide_points_is_above_the_plot(tmp_path: Path) -> None:
    grid = Curve("everywhere", [k % 20 for k in range(400)], [k // 20 for k in range(400)], "points")
    bottom = Curve("at the bottom", [0, 20], [0, 1], "points")
    heights = {}
    for curve in (grid, bottom):
        path = tmp_path / "a.svg"
        render_curves(path, [curve], **TEXTS)
        assert curve.label in texts(path)
        heights[curve.label] = float(ElementTree.parse(path).getroot().attrib["height"].removesuffix("pt"))
    assert heights["everywhere"] > heights["at the bottom"] == pytest.approx(72 * HEIGHT)
