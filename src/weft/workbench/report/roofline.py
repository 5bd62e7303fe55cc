"""The roofline: FLOP/s reached against FLOPs per compulsory byte, under the device's own ceilings.

S. Williams, A. Waterman and D. Patterson, 'Roofline: an insightful visual performance model'
(2009), with measured ceilings for roofs and compulsory bytes for traffic.
"""

from __future__ import annotations

import math

from markupsafe import Markup

from weft.workbench.report import frame, svg
from weft.workbench.report.devices import DeviceRecords, Roofs
from weft.workbench.report.frame import Plot
from weft.workbench.report.rows import Row
from weft.workbench.report.scales import Log, log_axis, unit


def roofline(device: DeviceRecords) -> Plot | None:
    """The plot of every timed row that counts FLOPs; None where there is none."""
    rows = [r for r in device.timed if r.nbytes and r.flops and r.flops > 0]
    if not rows:
        return None
    roofs, used = device.roofs, {r.rate for r in rows}
    flat = {k: v for k, v in roofs.matrix.items() if k in used}
    slope = max(filter(None, (roofs.copy, roofs.read)), default=None)
    x_axis = _intensities(rows, slope, flat)
    speeds = [_speed(r) for r in rows if not (r.suspect and flat)] + list(flat.values())
    if slope and not flat:
        speeds.append(slope * max(_intensity(r) for r in rows))
    y_axis = log_axis(speeds, room=2.2)
    drawn = Markup("").join(
        (
            frame.grid(x_axis, y_axis),
            svg.layer(*_roof_lines(roofs, slope, flat, x_axis, y_axis)),
            *_flat_labels(flat, y_axis),
            *(_slope_labels(roofs, slope, flat, x_axis, y_axis) if slope else ()),
            *frame.names({(x_axis.at(_intensity(r)), r.operator) for r in rows}),
            *(_mark(r, x_axis, y_axis, _ridge(r, slope, flat)) for r in rows),
        )
    )
    return Plot(
        picture=svg.tag("svg", drawn, class_="plot roofline", role="group", aria_label="Roofline"),
        title="Roofline",
        across="arithmetic intensity, FLOPs per byte that must be moved, logarithmic",
        up="FLOP/s reached, logarithmic",
        says="Each mark is one implementation at one case; the nearer to the line above it, "
        "the less time is left to win." + frame.nearest(rows, "its roof"),
        notes=_notes(device, rows, sorted(used - set(flat) - {""})),
    )


def _intensity(row: Row) -> float:
    assert row.flops and row.nbytes
    return row.flops / row.nbytes


def _speed(row: Row) -> float:
    assert row.flops and row.cold
    return row.flops / row.cold * 1e6


def _intensities(rows: list[Row], slope: float | None, flat: dict[str, float]) -> Log:
    """The x axis: every intensity, and the ridge of each roof that is drawn."""
    found = [_intensity(r) for r in rows]
    found += [v / slope for v in flat.values()] if slope else []
    axis = log_axis(found, room=2.5)
    return axis if axis.high / axis.low > 30 else Log(axis.low / 3, axis.high * 3)


def _ridge(row: Row, slope: float | None, flat: dict[str, float]) -> float:
    """The intensity from which FLOPs bind this row."""
    return flat[row.rate] / slope if slope and row.rate in flat else math.inf


def _roof_lines(
    roofs: Roofs, slope: float | None, flat: dict[str, float], x_axis: Log, y_axis: Log
) -> list[Markup]:
    lines: list[Markup] = []
    top = max(flat.values(), default=math.inf)
    for bandwidth, name in ((roofs.copy, "roof"), (roofs.read, "roof second")):
        if bandwidth:
            right = min(x_axis.high, top / bandwidth)
            ends = [(x_axis.low, bandwidth * x_axis.low), (right, bandwidth * right)]
            lines.append(_stroke(ends, x_axis, y_axis, name))
    for rate in flat.values():
        left = max(x_axis.low, rate / slope) if slope else x_axis.low
        lines.append(_stroke([(left, rate), (x_axis.high, rate)], x_axis, y_axis, "roof"))
    return lines


def _stroke(ends: list[tuple[float, float]], x_axis: Log, y_axis: Log, name: str) -> Markup:
    """A line in log-log space, which is not clamped: the layer clips what leaves it."""
    span = math.log(y_axis.high / y_axis.low)
    drawn = [(x_axis.at(x), 100 - 100 * math.log(y / y_axis.low) / span) for x, y in ends if y > 0]
    return svg.path(drawn, name)


def _flat_labels(flat: dict[str, float], y_axis: Log) -> list[Markup]:
    groups: list[list[tuple[str, float]]] = []
    for name, rate in sorted(flat.items(), key=lambda kv: kv[1]):
        # Roofs closer than a line of text share one, over the highest.
        if groups and y_axis.at(rate) - y_axis.at(groups[-1][-1][1]) < 6:
            groups[-1].append((name, rate))
        else:
            groups.append([(name, rate)])
    found = []
    for group in groups:
        words = " · ".join(f"{name} {unit(rate, 'FLOP/s')}" for name, rate in group)
        y = 100 - y_axis.at(group[-1][1])
        found.append(svg.label(words, x=100, y=y, dx=-4, dy=-6, class_="roof end"))
    return found


def _slope_labels(
    roofs: Roofs, slope: float, flat: dict[str, float], x_axis: Log, y_axis: Log
) -> list[Markup]:
    """Above the slope, ending at the line: the points stand below it."""
    right = min(x_axis.high, max(flat.values(), default=math.inf) / slope, y_axis.high / slope)
    left = max(x_axis.low, y_axis.low / slope)
    x = left * (right / left) ** 0.72
    at = (x_axis.at(x), 100 - y_axis.at(slope * x))
    first = "bandwidth" if roofs.derived else "copy"
    given = ((first, roofs.copy), ("read", roofs.read))
    named = [f"{n} {unit(v, 'B/s')}" for n, v in given if v]
    return [
        svg.label(text, x=at[0], y=at[1], dx=-14, dy=-4 - 15 * line, class_="roof end")
        for line, text in enumerate(reversed(named))
    ]


def _mark(row: Row, x_axis: Log, y_axis: Log, ridge: float) -> Markup:
    # A lane runs along the roof, so that a mark keeps its distance from it: up the slope where
    # bytes bind, level where FLOPs do.
    x, y = _intensity(row), _speed(row)
    aside = (x_axis.high / x_axis.low) ** (frame.lane(row) / 100)
    height = y_axis.at(y * aside if x < ridge else y)
    return frame.mark(row, x_axis.at(x * aside), 100 - height)


def _notes(device: DeviceRecords, rows: list[Row], unmeasured: list[str]) -> tuple[str, ...]:
    notes = frame.common_notes(rows)
    if device.roofs.derived:
        notes.append(frame.derived_note())
    if unmeasured:
        notes.append(f"No roof was measured here for: {', '.join(unmeasured)}.")
    return tuple(notes)
