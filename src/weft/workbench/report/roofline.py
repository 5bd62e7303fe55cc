"""Roofline plots: rates that each row reaches, under the device's measured peaks.

Rows that count FLOPs go into the roofline of S. Williams, A. Waterman and D. Patterson, 'Roofline: an
insightful visual performance model' (2009): FLOP/s against FLOPs per byte, with measured peaks as roofs and
compulsory bytes as traffic. Rows without FLOPs have no arithmetic intensity; a second plot shows their
bandwidth against their bytes, in which small cases fall short because launch overhead dominates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from markupsafe import Markup

from weft.core.implementation import BACKENDS
from weft.workbench.report import svg
from weft.workbench.report.device_records import DeviceRecords, Peaks, Row
from weft.workbench.report.labels import BOLD, GAP, LINE, NARROW, Screen, column_labels, for_each_screen, grid
from weft.workbench.report.scales import LinearAxis, LogAxis, log_axis, time, unit

ROOF_ZONE = 0.24  # share of the width at the right of all marks, for the names of the roofs
NAME_BAND = 0.22  # share of the bandwidth plot's height above the peaks, for their names and the operators'
LANE = 0.7  # percent of the width by which the marks of neighbouring backends are offset


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A rendered plot with the names of its axes, a summary of what it shows, and notes."""

    picture: Markup
    title: str
    x_name: str
    y_name: str
    summary: str
    notes: tuple[str, ...]


def bandwidth_plot(device: DeviceRecords) -> Plot | None:
    """Return bytes/s against bytes for timed rows without FLOPs; None if there are none."""
    rows = [r for r in device.timed if r.nbytes and not (r.flops and r.flops > 0)]
    if not rows:
        return None
    peaks = [("copy", device.peaks.copy), ("read", device.peaks.read)]
    known_peaks = [v for _, v in peaks if v]
    x_axis = log_axis([r.nbytes for r in rows if r.nbytes], margin=1.9)
    if x_axis.high / x_axis.low < 50:  # a few similar sizes: widen the axis to have several ticks
        x_axis = LogAxis(x_axis.low / 4, x_axis.high * 4)
    # A suspect time does not set the scale; its mark is clamped to the top edge.
    credible = [v for r in rows if (v := _bandwidth(r)) and not (r.suspect and known_peaks)]
    y_axis = LinearAxis(max(credible + known_peaks) / (1 - NAME_BAND))
    columns = {(x_axis.at(r.nbytes), r.operator) for r in rows if r.nbytes}
    marks = []
    for row in rows:
        rate = _bandwidth(row)
        assert row.nbytes is not None and rate is not None
        marks.append(_mark(row, x_axis.at(row.nbytes) + _lane_offset(row), 100 - y_axis.at(rate)))
    several = len({name for _, name in columns}) > 1
    content = [
        *for_each_screen(lambda screen: grid(x_axis, y_axis, screen)),
        svg.layer(*(_level(v, y_axis, "roof second" if n == "read" else "roof") for n, v in peaks if v)),
        *marks,
        *for_each_screen(
            lambda screen: [
                *_bandwidth_labels(peaks, y_axis, device.peaks.derived, screen),
                *(column_labels(columns, screen, top=True) if several else ()),
            ]
        ),
    ]
    return Plot(
        picture=svg.tag("svg", *content, class_="plot roofline bytes", role="group", aria_label="Bandwidth"),
        title="Bandwidth",
        x_name="bytes that must be moved, logarithmic",
        y_name="B/s reached",
        summary="Memory bandwidth alone bounds these operators: higher marks are closer to the measured "
        "peak. Small cases fall short because launch overhead dominates." + _closest(rows, "the peak"),
        notes=tuple(_notes(device, rows)),
    )


def _level(value: float, axis: LinearAxis | LogAxis, class_: str) -> Markup:
    y = 100 - axis.at(value)
    return svg.path([(0, y), (100, y)], class_)


def _bandwidth_labels(
    peaks: list[tuple[str, float | None]], y_axis: LinearAxis, derived: bool, screen: Screen
) -> list[Markup]:
    """Return the names of the peaks above the upper line at the left, on one line if the screen has room."""
    known = sorted((v, n) for n, v in peaks if v)
    if not known:
        return []
    texts = [f"{'bandwidth' if derived else name} {unit(value, 'B/s')}" for value, name in known]
    joined = " · ".join(texts)
    if screen.interval(joined, 0, "start", BOLD)[1] <= screen.width - GAP:
        texts = [joined]
    # Cases at the left are small and far below the peak, so the names do not cover marks there.
    y = 100 - y_axis.at(known[-1][0])
    return [
        svg.label(text, x=0, y=y, dx=GAP, dy=-GAP - LINE * line, class_="roof")
        for line, text in enumerate(texts)
    ]


def roofline(device: DeviceRecords) -> Plot | None:
    """Return FLOP/s against arithmetic intensity for timed rows with FLOPs; None if there are none."""
    rows = [r for r in device.timed if r.nbytes and r.flops and r.flops > 0]
    if not rows:
        return None
    peaks, rates = device.peaks, {r.rate for r in rows}
    flat = {k: v for k, v in peaks.matrix.items() if k in rates}  # horizontal roofs: FLOP/s by rate
    slope = max(filter(None, (peaks.copy, peaks.read)), default=None)  # sloped roof: bytes/s
    x_axis = _intensity_axis(rows, slope, flat)
    speeds = [_flop_rate(r) for r in rows if not (r.suspect and flat)] + list(flat.values())
    if slope and not flat:
        speeds.append(slope * max(_intensity(r) for r in rows))
    y_axis = _rate_axis(speeds)
    columns = {(x_axis.at(_intensity(r)), r.operator) for r in rows}
    content = [
        *for_each_screen(lambda screen: grid(x_axis, y_axis, screen)),
        svg.layer(*_roof_lines(peaks, slope, flat, x_axis, y_axis)),
        *for_each_screen(lambda screen: column_labels(columns, screen)),
        *(_roofline_mark(r, x_axis, y_axis, _ridge(r, slope, flat)) for r in rows),
        # The names of the roofs are drawn over the marks; the axes leave room for them beside the marks.
        *for_each_screen(
            lambda screen: [
                *_flat_labels(flat, y_axis, screen),
                *(_slope_labels(peaks, slope, flat, x_axis, y_axis, screen) if slope else ()),
            ]
        ),
    ]
    notes = _notes(device, rows)
    if slope and flat:
        notes.insert(0, "Sloped lines are bandwidths in B/s, level lines are peak rates in FLOP/s.")
    unmeasured = sorted(rates - set(flat) - {""})
    if unmeasured:
        notes.append(f"No peak was measured here for: {', '.join(unmeasured)}.")
    return Plot(
        picture=svg.tag("svg", *content, class_="plot roofline", role="group", aria_label="Roofline"),
        title="Roofline",
        x_name="arithmetic intensity, FLOPs per byte that must be moved, logarithmic",
        y_name="FLOP/s reached, logarithmic",
        summary="Each mark is one implementation at one case. The lines are the measured peaks; "
        "closer to the line above is better." + _closest(rows, "its peak"),
        notes=tuple(notes),
    )


def _intensity(row: Row) -> float:
    assert row.flops and row.nbytes
    return row.flops / row.nbytes


def _flop_rate(row: Row) -> float:
    assert row.flops and row.cold
    # `cold` is in us.
    return row.flops / row.cold * 1e6


def _intensity_axis(rows: list[Row], slope: float | None, flat: dict[str, float]) -> LogAxis:
    """Return the x axis: it holds every intensity, the ridge of each level roof, and the roofs' names."""
    intensities = [_intensity(r) for r in rows]
    ridges = [v / slope for v in flat.values()] if slope else []
    axis = log_axis([*intensities, *ridges], margin=2.5)
    if axis.high / axis.low < 30:
        axis = LogAxis(axis.low / 3, axis.high * 3)
    if not flat:
        return axis
    # The marks end where the names of the roofs begin; 1.3 is half of a mark.
    span = math.log(1.3 * max(intensities) / axis.low) / (1 - ROOF_ZONE)
    return LogAxis(axis.low, max(axis.high, axis.low * math.exp(span)))


def _rate_axis(speeds: list[float]) -> LogAxis:
    """Return the y axis: it holds every rate, the operators' names below them, and two lines above."""
    low, high = min(speeds), max(speeds)
    span = high / low
    return LogAxis(low / (1.4 * span**0.18), high * 1.4 * span**0.12)


def _ridge(row: Row, slope: float | None, flat: dict[str, float]) -> float:
    """Return the intensity above which FLOPs, not bytes, bound this row."""
    return flat[row.rate] / slope if slope and row.rate in flat else math.inf


def _roof_lines(
    peaks: Peaks, slope: float | None, flat: dict[str, float], x_axis: LogAxis, y_axis: LogAxis
) -> list[Markup]:
    lines: list[Markup] = []
    top = max(flat.values(), default=math.inf)
    for bandwidth, class_ in ((peaks.copy, "roof"), (peaks.read, "roof second")):
        if bandwidth:
            right = min(x_axis.high, top / bandwidth)  # the slope ends at its ridge
            ends = [(x_axis.low, bandwidth * x_axis.low), (right, bandwidth * right)]
            lines.append(_roof_line(ends, x_axis, y_axis, class_))
    for rate in flat.values():
        left = max(x_axis.low, rate / slope) if slope else x_axis.low
        lines.append(_roof_line([(left, rate), (x_axis.high, rate)], x_axis, y_axis, "roof"))
    return lines


def _roof_line(ends: list[tuple[float, float]], x_axis: LogAxis, y_axis: LogAxis, class_: str) -> Markup:
    # Not clamped like LogAxis.at, which would bend the line; the layer clips what lies outside.
    span = math.log(y_axis.high / y_axis.low)
    points = [(x_axis.at(x), 100 - 100 * math.log(y / y_axis.low) / span) for x, y in ends if y > 0]
    return svg.path(points, class_)


def _flat_labels(flat: dict[str, float], y_axis: LogAxis, screen: Screen) -> list[Markup]:
    """Return the names of the level roofs above their lines, at the right."""
    groups: list[list[tuple[str, float]]] = []
    for name, rate in sorted(flat.items(), key=lambda kv: kv[1]):
        # Roofs that are too close for the names between them are listed above the highest.
        below = screen.height * (y_axis.at(rate) - y_axis.at(groups[-1][-1][1])) / 100 if groups else math.inf
        if groups and below < LINE * len(groups[-1]) + GAP:
            groups[-1].append((name, rate))
        else:
            groups.append([(name, rate)])
    labels = []
    for group in groups:
        y = 100 - y_axis.at(group[-1][1])
        for line, (name, rate) in enumerate(group):
            # On a phone the y axis gives the unit.
            text = f"{name} {unit(rate, '' if screen is NARROW else 'FLOP/s')}"
            labels.append(svg.label(text, x=100, y=y, dx=-4, dy=-6 - LINE * line, class_="roof end"))
    return labels


def _slope_labels(
    peaks: Peaks, slope: float, flat: dict[str, float], x_axis: LogAxis, y_axis: LogAxis, screen: Screen
) -> list[Markup]:
    """Return the names of the bandwidths: beside the slope, or above it at the left where room is short.

    Neither covers a mark, because the marks are below the slope.
    """
    bandwidths = (("bandwidth" if peaks.derived else "copy", peaks.copy), ("read", peaks.read))
    texts = [f"{name} {unit(v, 'B/s')}" for name, v in bandwidths if v]
    right = min(x_axis.high, max(flat.values(), default=math.inf) / slope, y_axis.high / slope)
    left = max(x_axis.low, y_axis.low / slope)
    x = left * (right / left) ** 0.72  # far enough along the slope to have room at its left
    x_percent, y_percent = x_axis.at(x), 100 - y_axis.at(slope * x)
    longest = max(texts, key=len)
    if screen.interval(longest, x_percent, "end", BOLD)[0] < 2 * GAP:
        return [
            svg.label(text, x=0, y=0, dx=GAP, dy=LINE * (line + 1), class_="roof")
            for line, text in enumerate(texts)
        ]
    return [
        svg.label(text, x=x_percent, y=y_percent, dx=-14, dy=-4 - LINE * line, class_="roof end")
        for line, text in enumerate(reversed(texts))
    ]


def _roofline_mark(row: Row, x_axis: LogAxis, y_axis: LogAxis, ridge: float) -> Markup:
    # The offset runs along the roof, so that a mark keeps its distance from it: up the slope where bytes
    # bound the row, horizontally where FLOPs do.
    x, y = _intensity(row), _flop_rate(row)
    factor = (x_axis.high / x_axis.low) ** (_lane_offset(row) / 100)
    height = y_axis.at(y * factor if x < ridge else y)
    return _mark(row, x_axis.at(x * factor), 100 - height)


def _lane_offset(row: Row) -> float:
    """Return the horizontal offset of this row's backend in percent of the width, centred on zero."""
    lane = BACKENDS.index(row.backend) - 2.5 if row.backend in BACKENDS else 3.5
    return lane * LANE


def _mark(row: Row, x: float, y: float) -> Markup:
    """Return the row's marker at a position in percent from the left and the top."""
    rates = [unit(_bandwidth(row), "B/s")]
    if row.flops and row.flops > 0 and row.cold:
        rates.append(unit(_flop_rate(row), "FLOP/s"))
    tip = (
        f"{row.operator} · {row.implementation} · {row.case} · {row.direction}: {time(row.cold)}, "
        f"{', '.join(rates)}, {row.share_of_limit} of the limit"
    )
    hollow = "hollow" if row.direction != "forward" else ""
    return svg.marker(row.backend, tip, x=x, y=y, classes=f"{hollow} {'step' if row.step else ''}")


def _bandwidth(row: Row) -> float | None:
    """Return compulsory bytes per second."""
    return row.nbytes / row.cold * 1e6 if row.nbytes and row.cold else None


def _closest(rows: list[Row], line: str) -> str:
    """Return a sentence that names the row with the largest share of its limit."""
    rated = [r for r in rows if r.efficiency and not r.suspect]
    if not rated:
        return ""
    best = max(rated, key=lambda r: r.efficiency or 0)
    return (
        f" Closest to {line}: {best.implementation} in {best.operator} {best.case} "
        f"{best.direction}, at {best.share_of_limit} of the limit."
    )


def _notes(device: DeviceRecords, rows: list[Row]) -> list[str]:
    notes = ["Overlapping points are offset slightly."]
    if any(r.direction != "forward" for r in rows):
        notes.append("Hollow marks are backward passes.")
    if any(r.step for r in rows):
        notes.append("Faint marks are the steps of a ladder.")
    if device.peaks.derived:
        notes.append("These records carry no measured peaks: the lines are computed from their limits.")
    return notes
