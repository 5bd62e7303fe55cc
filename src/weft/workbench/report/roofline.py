"""The roofline: FLOP/s reached against FLOPs per compulsory byte, under the device's own ceilings.

S. Williams, A. Waterman and D. Patterson, 'Roofline: an insightful visual performance model'
(2009), with measured ceilings for roofs and compulsory bytes for traffic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from markupsafe import Markup

from weft.core.implementation import BACKENDS
from weft.workbench.report import svg
from weft.workbench.report.devices import DeviceRecords, Roofs
from weft.workbench.report.rows import Row
from weft.workbench.report.scales import Log, log_axis, share, tick_label, time, unit

LANE = 0.7  # percent of the width between the lanes that keep one backend from hiding another


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The drawn plot with the sentences beside it."""

    picture: Markup
    says: str
    notes: tuple[str, ...]


def roofline(device: DeviceRecords) -> Roofline | None:
    """The plot of every timed row that has bytes to its name; None where there is none."""
    rows = [r for r in device.timed if r.nbytes]
    if not rows:
        return None
    counted = [r for r in rows if r.flops and r.flops > 0]
    bare = len(rows) - len(counted)
    roofs, used = device.roofs, {r.rate for r in rows}
    flat = {k: v for k, v in device.roofs.matrix.items() if k in used}
    slope = max(filter(None, (roofs.copy, roofs.read)), default=None)
    x_axis = _intensities(counted, slope, flat)
    placed = [(r, *_place(r, x_axis.low)) for r in rows]
    speeds = [y for _, _, y in placed] + list(flat.values())
    if slope and not flat:
        speeds.append(slope * max(x for _, x, _ in placed))
    y_axis = log_axis(speeds, room=2.2)
    plot = Markup("").join(
        (
            _grid(x_axis, y_axis),
            svg.layer(*_roof_lines(roofs, slope, flat, x_axis, y_axis)),
            *_roof_labels(slope, roofs, flat, x_axis, y_axis),
            *_columns(counted, x_axis),
            *(_point(r, x, y, x_axis, y_axis, _ridge(r, slope, flat)) for r, x, y in placed),
        )
    )
    picture = svg.tag("svg", plot, class_="plot roofline", role="group", aria_label="Roofline")
    return Roofline(picture=picture, says=_sentence(rows), notes=_notes(device, bare, flat, used))


def _ridge(row: Row, slope: float | None, flat: dict[str, float]) -> float:
    """The intensity from which FLOPs bind this row."""
    return flat[row.rate] / slope if slope and row.rate in flat else math.inf


def _intensities(counted: list[Row], slope: float | None, flat: dict[str, float]) -> Log:
    """The x axis: every intensity, and the ridge of each roof that is drawn."""
    found = [r.flops / r.nbytes for r in counted if r.flops and r.nbytes] or [1.0]
    found += [v / slope for v in flat.values()] if slope else []
    axis = log_axis(found, room=2.5)
    return axis if axis.high / axis.low > 30 else Log(axis.low / 3, axis.high * 3)


def _place(row: Row, left: float) -> tuple[float, float]:
    """Intensity and FLOP/s; a row without FLOPs stands at the left edge, at its own bandwidth."""
    assert row.nbytes is not None and row.cold is not None
    intensity = row.flops / row.nbytes if row.flops and row.flops > 0 else left
    return intensity, intensity * row.nbytes / row.cold * 1e6


def _grid(x_axis: Log, y_axis: Log) -> Markup:
    parts: list[Markup] = []
    for value in x_axis.ticks():
        at = svg.percent(x_axis.at(value))
        parts.append(svg.tag("line", x1=at, x2=at, y1="0%", y2="100%", class_="grid"))
        text = tick_label(value)
        parts.append(svg.label(text, x=x_axis.at(value), y=100, dy=18, class_="tick mid"))
    for value in y_axis.ticks(6):
        at = svg.percent(100 - y_axis.at(value))
        parts.append(svg.tag("line", x1="0%", x2="100%", y1=at, y2=at, class_="grid"))
        text = tick_label(value)
        parts.append(svg.label(text, x=0, y=100 - y_axis.at(value), dx=-8, dy=4, class_="tick end"))
    return Markup("").join(parts)


def _roof_lines(
    roofs: Roofs, slope: float | None, flat: dict[str, float], x_axis: Log, y_axis: Log
) -> list[Markup]:
    lines: list[Markup] = []
    if slope:
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
    """A line in log-log space, which is not clamped: the plot clips what leaves it."""
    span = math.log(y_axis.high / y_axis.low)
    drawn = [(x_axis.at(x), 100 - 100 * math.log(y / y_axis.low) / span) for x, y in ends if y > 0]
    return svg.path(drawn, name)


def _roof_labels(
    slope: float | None, roofs: Roofs, flat: dict[str, float], x_axis: Log, y_axis: Log
) -> list[Markup]:
    found: list[Markup] = []
    groups: list[list[tuple[str, float]]] = []
    for name, rate in sorted(flat.items(), key=lambda kv: kv[1]):
        # Roofs closer than a line of text share one, over the highest.
        if groups and y_axis.at(rate) - y_axis.at(groups[-1][-1][1]) < 6:
            groups[-1].append((name, rate))
        else:
            groups.append([(name, rate)])
    for group in groups:
        words = " · ".join(f"{name} {unit(rate, 'FLOP/s')}" for name, rate in group)
        y = 100 - y_axis.at(group[-1][1])
        found.append(svg.label(words, x=100, y=y, dx=-4, dy=-6, class_="roof end"))
    if slope:
        # Above the middle of the slope, ending at the line: the points stand below it.
        right = min(x_axis.high, max(flat.values(), default=math.inf) / slope)
        right = min(right, y_axis.high / slope)
        x = x_axis.low * (right / x_axis.low) ** 0.72
        at = (x_axis.at(x), 100 - y_axis.at(slope * x))
        first = "bandwidth" if roofs.derived else "copy"
        given = ((first, roofs.copy), ("read", roofs.read))
        named = [f"{n} {unit(v, 'B/s')}" for n, v in given if v]
        for line, text in enumerate(reversed(named)):
            found.append(
                svg.label(text, x=at[0], y=at[1], dx=-14, dy=-4 - 15 * line, class_="roof end")
            )
    return found


def _columns(counted: list[Row], x_axis: Log) -> list[Markup]:
    """The operators' names at the foot of their columns; neighbours too close share a label."""
    columns: list[list[tuple[float, str]]] = []
    at = {(x_axis.at(r.flops / r.nbytes), r.operator) for r in counted if r.flops and r.nbytes}
    for x, operator in sorted(at):
        if columns and x - columns[-1][-1][0] < 14:
            columns[-1].append((x, operator))
        else:
            columns.append([(x, operator)])
    found = []
    for column in columns:
        x = sum(at for at, _ in column) / len(column)
        side = "start" if x < 8 else "end" if x > 92 else "mid"
        names = list(dict.fromkeys(name for _, name in column))
        for line, name in enumerate(reversed(names[:4])):
            found.append(svg.label(name, x=x, y=100, dy=-8 - 13 * line, class_=f"column {side}"))
    return found


def _point(row: Row, x: float, y: float, x_axis: Log, y_axis: Log, ridge: float) -> Markup:
    lane = BACKENDS.index(row.backend) - 2.5 if row.backend in BACKENDS else 3.5
    reached = unit(y, "FLOP/s") if row.flops else "no FLOPs counted"
    tip = (
        f"{row.operator} · {row.implementation} · {row.case} · {row.direction}: {time(row.cold)}, "
        f"{reached}, {unit(_bandwidth(row), 'B/s')}, {share(row.efficiency)} of the limit"
    )
    # A lane runs along the roof, so that a mark keeps its distance from it: up the slope where
    # bytes bind, level where FLOPs do.
    aside = (x_axis.high / x_axis.low) ** (lane * LANE / 100)
    at = x_axis.at(x * aside)
    height = 100 - y_axis.at(y * aside if x < ridge else y)
    kind = "hollow" if row.direction != "forward" else ""
    return svg.marker(row.backend, tip, x=at, y=height, kind=f"{kind} {'step' if row.step else ''}")


def _bandwidth(row: Row) -> float | None:
    return row.nbytes / row.cold * 1e6 if row.nbytes and row.cold else None


def _sentence(rows: list[Row]) -> str:
    rated = [r for r in rows if r.efficiency and "suspect" not in r.flags]
    text = (
        "Each mark is one implementation at one case; the nearer to the line above it, "
        "the less time is left to win."
    )
    if not rated:
        return text
    best = max(rated, key=lambda r: r.efficiency or 0)
    return (
        f"{text} Nearest to its roof: {best.implementation} in {best.operator} {best.case} "
        f"{best.direction}, at {share(best.efficiency)} of the limit."
    )


def _notes(
    device: DeviceRecords, bare: int, flat: dict[str, float], used: set[str]
) -> tuple[str, ...]:
    apart = "Backends at one intensity are set a little apart along the roof"
    notes = [f"{apart}, so that none hides another."]
    if any(r.direction != "forward" for r in device.timed):
        notes.append("Hollow marks are backward passes.")
    if any(r.step for r in device.timed):
        notes.append("Faint marks are the steps of a ladder.")
    if bare:
        notes.append(
            f"{bare} {'mark' if bare == 1 else 'marks'} without a FLOP count "
            f"{'stands' if bare == 1 else 'stand'} at the left edge, "
            "at the right distance from the bandwidth roof."
        )
    if device.roofs.derived:
        notes.append(
            "These records carry no measured ceilings: the roofs are worked back from their floors."
        )
    missing = sorted(used - set(flat) - {""})
    if missing:
        notes.append(f"No roof was measured here for: {', '.join(missing)}.")
    return tuple(notes)
