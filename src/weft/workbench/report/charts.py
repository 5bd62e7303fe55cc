"""Bar charts of each case, and dots that show how close each case comes to the device's limit."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from weft.core.record import PASS
from weft.workbench.report import svg
from weft.workbench.report.device_records import DeviceRecords, Row
from weft.workbench.report.scales import linear_ticks, time, times

TRUNCATE_AT = 8.0  # a bar of more than 8 times the fastest is truncated, so that the others stay readable
UNITS = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"), (1e-3, "ns"))  # in microseconds


@dataclass(frozen=True, kw_only=True)
class Tick:
    x: float  # percent
    text: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Time of one implementation; positions are in percent of the track's width."""

    row: Row
    length: float
    low: float | None
    high: float | None
    truncated: bool
    tip: str


@dataclass(frozen=True, kw_only=True)
class Bars:
    """All implementations at one case and direction, the fastest first."""

    operator: str
    case: str
    direction: str
    bars: tuple[Bar, ...]
    untimed: tuple[Row, ...]
    limit: float | None  # position in percent
    limit_time: str
    ticks: tuple[Tick, ...]
    unit: str
    summary: str

    @property
    def longest_name(self) -> int:
        """Length in characters, with the flags beside the name."""
        return max(
            len(b.row.implementation) + sum(len(f.split(":")[0]) + 2 for f in b.row.flags) for b in self.bars
        )


def bars(device: DeviceRecords) -> list[Bars]:
    """Return one chart for each point that has a time."""
    return [_chart(p, rows) for p, rows in device.points.items() if any(r.timed for r in rows)]


def _chart(point: tuple[str, str, str], rows: list[Row]) -> Bars:
    timed = [r for r in rows if r.cold is not None]
    colds = [r.cold for r in timed if r.cold is not None]
    limit = next((r.limit for r in timed if r.limit), None)
    # A suspect time does not set the scale: if it is far too short, all other bars would be truncated.
    fastest = min((r.cold for r in timed if r.cold and not r.suspect), default=colds[0])
    longest = max(c for c in colds if c <= TRUNCATE_AT * fastest)
    # Upper ends of the intervals must fit as well, except those of truncated bars.
    ends = [r.high for r in timed if r.high and r.cold and r.cold <= longest]
    high = max(longest, *ends, limit or 0) * 1.04  # a margin of 4 % at the right
    size, unit = next((s for s in UNITS if high >= s[0]), UNITS[-1])
    return Bars(
        operator=point[0],
        case=point[1],
        direction=point[2],
        bars=tuple(_bar(r, high) for r in timed),
        untimed=tuple(r for r in rows if r.cold is None),
        limit=100 * limit / high if limit else None,
        limit_time=time(limit),
        ticks=tuple(Tick(x=100 * t * size / high, text=f"{t:g}") for t in linear_ticks(high / size, 4)),
        unit=unit,
        summary=_summary(timed),
    )


def _bar(row: Row, high: float) -> Bar:
    assert row.cold is not None
    within = row.cold <= high
    tip = [f"{row.implementation}: {time(row.cold)}"]
    if row.low and row.high:
        tip.append(f"95 % interval {time(row.low)} to {time(row.high)}")
    if row.p10 and row.p90:
        tip.append(f"p10 to p90 {time(row.p10)} to {time(row.p90)}")
    tip += [f"{row.share_of_limit} of the limit"] if row.efficiency else []
    tip += [f"{row.samples} samples"] if row.samples else []
    return Bar(
        row=row,
        length=100 * row.cold / high if within else 100.0,
        low=100 * row.low / high if row.low and within else None,
        high=min(100.0, 100 * row.high / high) if row.high and within else None,
        truncated=not within,
        tip=", ".join(tip),
    )


def _summary(timed: list[Row]) -> str:
    """Return the result of the chart in one sentence."""
    passed = [r for r in timed if r.status == PASS and not r.suspect]
    if not passed:
        return "No implementation that passed has a time here."
    best = passed[0]
    # Sorted by time: an interval that begins below the end of the best one's is not distinguishable from it.
    overlapping = [r.implementation for r in passed[1:] if r.low and best.high and r.low <= best.high]
    text = f"{best.implementation} is the fastest, at {time(best.cold)}"
    if overlapping:
        text = f"{best.implementation} leads at {time(best.cold)}, level with {', '.join(overlapping)}"
        text += " (their intervals overlap)"
    if best.speedup and best.backend not in ("eager", "compile"):
        text += f", {times(best.speedup)} against the faster of eager and compile"
    if best.efficiency:
        text += f"; {best.share_of_limit} of the limit"
    return text + "."


@dataclass(frozen=True, kw_only=True)
class Closeness:
    """Shares of the limit at one case: a dot for each implementation."""

    operator: str
    case: str
    direction: str
    marks: tuple[Markup, ...]
    best: Row


def closeness(device: DeviceRecords) -> list[Closeness]:
    """Return the shares of the limit for each case that has an efficiency."""
    charts = []
    for (operator, case, direction), rows in device.points.items():
        rated = [r for r in rows if r.efficiency]
        if not rated:
            continue
        credible = [r for r in rated if not r.suspect] or rated
        best = max(credible, key=lambda r: r.efficiency or 0)
        charts.append(
            Closeness(
                operator=operator,
                case=case,
                direction=direction,
                # The best mark comes last, so that no other mark covers it.
                marks=tuple(_mark(r, r is best) for r in sorted(rated, key=lambda r: r is best)),
                best=best,
            )
        )
    return charts


def _mark(row: Row, best: bool) -> Markup:
    x = min(100 * (row.efficiency or 0), 110) / 1.1  # the track ends at 110 %
    tip = f"{row.implementation}: {row.share_of_limit} of the limit, {time(row.cold)}"
    hollow = "hollow" if row.direction != "forward" else ""
    classes = f"{hollow} {'step' if row.step and not best else ''}"
    return svg.marker(row.backend, tip, x=x, y=50, classes=classes)
