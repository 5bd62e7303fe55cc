"""A picture says what it shows, is the same bits each time, and refuses what it cannot show."""

from __future__ import annotations

import doctest
import sys
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from weft.core import WeftError
from weft.workbench import pictures
from weft.workbench.pictures import COLOURS, Curve, Mark, draw

WORDS: dict[str, Any] = {
    "title": "Copy over size",
    "x": "size (bytes)",
    "y": "bandwidth (GB/s)",
    "says": "Bandwidth rises with size & stays under the ceiling < 5 TB/s, whatever $dtype$ it is.",
}
LINE = Curve("measured", [1, 10, 100, 5000], [2.0, 30.0, 250.0, 300.0])
POINTS = Curve("seen $2", [1, 100], [5, 50], style="points")


def texts(path: Path) -> str:
    root = ElementTree.parse(path).getroot()
    return " ".join("".join(t.itertext()) for t in root.iter("{http://www.w3.org/2000/svg}text"))


def test_all_words_stand_in_the_picture_as_text(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.svg"
    draw(path, [LINE, POINTS], **WORDS, log_x=True, log_y=True, marks=[Mark(70, "turns here")])
    seen = texts(path)
    for word in (*WORDS.values(), "measured", "seen $2", "turns here", "1k", "100"):
        assert all(part in seen for part in word.split()), word


def test_ticks_read_as_their_examples_say() -> None:
    assert doctest.testmod(pictures).attempted == 1 and not doctest.testmod(pictures).failed


def test_drawn_again_it_is_the_same_bits_whatever_the_users_settings(tmp_path: Path) -> None:
    import matplotlib

    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    draw(first, [LINE, POINTS], **WORDS)
    with matplotlib.rc_context({"lines.linewidth": 9.0, "figure.facecolor": "red"}):
        draw(second, (c for c in (LINE, POINTS)), **WORDS)
        assert matplotlib.rcParams["lines.linewidth"] == 9.0
    assert first.read_bytes() == second.read_bytes()
    other = Curve("measured", [1, 10, 100, 5000], [2.0, 30.0, 250.0, 301.0])
    draw(second, [other, POINTS], **WORDS)
    assert first.read_bytes() != second.read_bytes()


@pytest.mark.parametrize(
    ("curves", "change"),
    [
        *(([LINE], {word: " "}) for word in WORDS),
        ([], {}),
        ([Curve("short", [1, 2], [1])], {}),
        ([Curve("empty", [], [])], {}),
        ([Curve("nan", [1], [float("nan")])], {}),
        ([Curve("zero", [0, 1], [1, 2])], {"log_x": True}),
        ([Curve("minus", [1, 2], [-1, 2])], {"log_y": True}),
        ([LINE], {"log_x": True, "marks": [Mark(0, "nowhere")]}),
    ],
)
def test_what_cannot_be_shown_is_refused(
    curves: list[Curve], change: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(WeftError):
        draw(tmp_path / "a.svg", curves, **{**WORDS, **change})
    assert not (tmp_path / "a.svg").exists()


def test_without_matplotlib_the_hint_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(WeftError, match=r"pip install 'weft\[plots\]'"):
        draw(tmp_path / "a.svg", [LINE], **WORDS)
    with pytest.raises(WeftError, match=r"\.svg"):
        draw(tmp_path / "a.png", [LINE], **WORDS)


# The share of red, green and blue light that a dichromat's eye keeps (Viénot, Brettel and Mollon
# 1999), in linear light: who lacks the red cones, and who lacks the green ones.
SEEN = {
    "protan": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
    "deutan": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
}


@pytest.mark.parametrize("eye", SEEN)
def test_colours_stay_apart_to_the_colour_blind(eye: str) -> None:
    def seen(colour: str) -> tuple[float, ...]:
        light = [(int(colour[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]
        mixed = [sum(w * c for w, c in zip(row, light, strict=True)) for row in SEEN[eye]]
        return tuple(max(0.0, m) ** (1 / 2.2) for m in mixed)

    for one, other in combinations(COLOURS[:5], 2):  # the first five: more curves are rare
        far = max(abs(a - b) for a, b in zip(seen(one), seen(other), strict=True))
        assert far > 0.1, f"{one} and {other} look alike"
