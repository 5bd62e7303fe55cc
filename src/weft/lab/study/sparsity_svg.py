"""Picture of the sparsity study: time against dense by density, a panel for each size and mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from weft.lab.study import sparsity_report as report
from weft.lab.study.sparsity import CSR, MODES, SEMI, fastest
from weft.workbench.report.scales import LogAxis, log_axis, tick_label

THEMES: Mapping[str, Mapping[str, Any]] = {
    "light": {
        "back": "#ffffff",
        "text": "#1f2328",
        "muted": "#59636e",
        "grid": "#d1d9e0",
        "lines": ("#0072b2", "#009e73", "#d55e00", "#8250df", "#b35900"),
    },
    "dark": {
        "back": "#0d1117",
        "text": "#e6edf3",
        "muted": "#9198a1",
        "grid": "#3d444d",
        "lines": ("#56b4e9", "#3fd6a0", "#ff8c42", "#d2a8ff", "#e3b341"),
    },
}
PANEL, HEIGHT, LEFT, TOP, GAP = 340, 190, 56, 64, 44  # in units of the picture
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4")  # one for each kind, beside its colour


def plot_all(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the picture in both themes into ``folder``; return the paths, none for a record without times."""
    if not any(row["us"] is not None for row in record["rows"]):
        return []
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for theme in THEMES:
        path = folder / f"study-sparsity-{theme}.svg"
        path.write_text(svg(record, theme))
        paths.append(path)
    return paths


def svg(record: Mapping[str, Any], theme: str) -> str:
    """Return the picture as text: a row of panels for each size, inference left and training right."""
    colours = THEMES[theme]
    axis = _ratio_axis(record)
    width = LEFT + len(MODES) * (PANEL + GAP)
    height = TOP + len(record["sizes"]) * (HEIGHT + 2 * GAP) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{colours["text"]}">',
        f"<title>Which sparsity pays: {escape(str(record['machine']['device']))}</title>",
        "<desc>Time of a product with a sparse weight, as a share of the dense product's, by density. Below "
        "the line at 1 the sparse weight is faster.</desc>",
        f'<rect width="{width}" height="{height}" fill="{colours["back"]}"/>',
        f'<text x="{LEFT}" y="20" font-size="14">Time against dense by density of the weight: '
        f"{escape(str(record['machine']['device']))}, {record['dtype']}</text>",
        *_legend(colours),
    ]
    for number, size in enumerate(record["sizes"]):
        for column, mode in enumerate(MODES):
            x, y = LEFT + column * (PANEL + GAP), TOP + GAP // 2 + number * (HEIGHT + 2 * GAP)
            parts.append(f'<g transform="translate({x} {y})">')
            parts += _panel(record, size, mode, axis, colours)
            parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _legend(colours: Mapping[str, Any]) -> Iterator[str]:
    x = LEFT
    for kind, colour, dash in zip(report.SPARSE_KINDS, colours["lines"], DASHES, strict=True):
        name = report.kind_name(*kind)
        yield (
            f'<path d="M{x} 40h26" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
            f'<text x="{x + 31}" y="44">{name}</text>'
        )
        x += 48 + 6 * len(name)
    yield f'<rect x="{x}" y="36" width="8" height="8" fill="{colours["text"]}"/>'
    yield f'<text x="{x + 13}" y="44">2:4</text>'


def _ratios(
    record: Mapping[str, Any], size: Sequence[int], mode: str, kind: str, block: int
) -> list[tuple[float, float]]:
    """Return density and time against dense of the fastest implementation."""
    dense = report.dense_us(record, size, mode)
    timed = fastest(dict(record), size, mode, kind, block)
    return [(density, row["us"] / dense) for density, row in timed.items()] if dense else []


def _ratio_axis(record: Mapping[str, Any]) -> LogAxis:
    values = [
        ratio
        for size in record["sizes"]
        for mode in MODES
        for kind in (*report.SPARSE_KINDS, (SEMI, 0))
        for _, ratio in _ratios(record, size, mode, *kind)
    ]
    return log_axis([*values, 1.0], margin=1.2)


def _panel(
    record: Mapping[str, Any], size: Sequence[int], mode: str, axis: LogAxis, colours: Mapping[str, Any]
) -> Iterator[str]:
    """Draw one panel: grid, the line of the dense product, a curve for each kind, a square for 2:4."""
    densities, muted = log_axis([*record["densities"], 0.5], margin=1.1), colours["muted"]

    def at(density: float, ratio: float) -> tuple[float, float]:
        return PANEL * densities.at(density) / 100, HEIGHT * (1 - axis.at(ratio) / 100)

    yield f'<text x="0" y="-8">{escape(report.title(record, size, mode))}</text>'
    for ratio in axis.ticks(lambda ticks: len(ticks) <= 8):
        _, y = at(0.5, ratio)
        yield f'<path d="M0 {y:.1f}h{PANEL}" stroke="{colours["grid"]}"/>'
        label = tick_label(ratio)
        yield f'<text x="-6" y="{y + 4:.1f}" text-anchor="end" fill="{muted}">{label}</text>'
    for density in record["densities"]:
        x, _ = at(density, 1.0)
        yield f'<path d="M{x:.1f} {HEIGHT}v4" stroke="{colours["muted"]}"/>'
        label = f"{100 * density:g} %"
        yield (f'<text x="{x:.1f}" y="{HEIGHT + 17}" text-anchor="middle" fill="{muted}">{label}</text>')
    _, y = at(0.5, 1.0)
    yield f'<path d="M0 {y:.1f}h{PANEL}" stroke="{colours["text"]}" stroke-width="1.5"/>'
    yield f'<text x="{PANEL}" y="{y - 4:.1f}" text-anchor="end">dense</text>'
    for kind, colour, dash in zip(report.SPARSE_KINDS, colours["lines"], DASHES, strict=True):
        points = [at(*point) for point in _ratios(record, size, mode, *kind)]
        if points:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
            yield f'<polyline points="{line}" {style}/>'
            shape = "r='3'" if kind[0] != CSR else "r='2'"
            yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" {shape} fill="{colour}"/>' for x, y in points)
    for x, y in (at(*point) for point in _ratios(record, size, mode, SEMI, 0)):
        yield f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colours["text"]}"/>'
