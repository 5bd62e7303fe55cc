"""Bars per case, and dots that show how close each case comes to the device's limit."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from weft.core.record import PASS
from weft.workbench.report import svg
from weft.workbench.report.devices import DeviceRecords
from weft.workbench.report.rows import Row
from weft.workbench.report.scales import linear_ticks, share, time, times

CUT = 8.0  # a bar longer than this many times the fastest is torn off, lest it flatten the others
UNITS = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"), (1e-3, "ns"))  # in microseconds


@dataclass(frozen=True, kw_only=True)
class Tick:
    at: float  # percent
    text: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One implementation's time; places in percent of the track's width."""

    row: Row
    length: float
    low: float | None
    high: float | None
    torn: bool
    tip: str


@dataclass(frozen=True, kw_only=True)
class Bars:
    """All implementations at one case and direction, fastest first."""

    operator: str
    case: str
    direction: str
    bars: tuple[Bar, ...]
    untimed: tuple[Row, ...]
    floor: float | None
    floor_time: str
    ticks: tuple[Tick, ...]
    unit: str
    says: str

    @property
    def longest_name(self) -> int:
        """In characters, with the flags that stand beside it."""
        return max(
            len(b.row.implementation) + sum(len(f.split(":")[0]) + 2 for f in b.row.flags)
            for b in self.bars
        )


def bars(device: DeviceRecords) -> list[Bars]:
    """One chart for each point that has a time."""
    return [_bars(p, rows) for p, rows in device.points.items() if any(r.timed for r in rows)]


def _bars(point: tuple[str, str, str], rows: list[Row]) -> Bars:
    timed = [r for r in rows if r.cold is not None]
    colds = [r.cold for r in timed if r.cold is not None]
    floor = next((r.floor for r in timed if r.floor), None)
    # A time that the clock did not believe sets no scale, or it would tear off all the others.
    honest = min((r.cold for r in timed if r.cold and not r.suspect), default=colds[0])
    longest = max(c for c in colds if c <= CUT * honest)
    ends = [r.high for r in timed if r.high and r.cold and r.cold <= longest]
    high = max(longest, *ends, floor or 0) * 1.04
    size, unit = next((s for s in UNITS if high >= s[0]), UNITS[-1])
    round_ = linear_ticks(high / size, 4)
    return Bars(
        operator=point[0],
        case=point[1],
        direction=point[2],
        bars=tuple(_bar(r, high) for r in timed),
        untimed=tuple(r for r in rows if r.cold is None),
        floor=100 * floor / high if floor else None,
        floor_time=time(floor),
        ticks=tuple(Tick(at=100 * t * size / high, text=f"{t:g}") for t in round_),
        unit=unit,
        says=_winner(timed),
    )


def _bar(row: Row, high: float) -> Bar:
    assert row.cold is not None
    within = row.cold <= high
    parts = [f"{row.implementation}: {time(row.cold)}"]
    if row.low and row.high:
        parts.append(f"95 % interval {time(row.low)} to {time(row.high)}")
    if row.p10 and row.p90:
        parts.append(f"p10 to p90 {time(row.p10)} to {time(row.p90)}")
    parts += [f"{share(row.efficiency)} of the limit"] if row.efficiency else []
    parts += [f"{row.samples} samples"] if row.samples else []
    return Bar(
        row=row,
        length=100 * row.cold / high if within else 100.0,
        low=100 * row.low / high if row.low and within else None,
        high=min(100.0, 100 * row.high / high) if row.high and within else None,
        torn=not within,
        tip=", ".join(parts),
    )


def _winner(timed: list[Row]) -> str:
    """The chart's finding in a sentence."""
    passed = [r for r in timed if r.status == PASS and not r.suspect]
    if not passed:
        return "Nothing that passed was timed here."
    best = passed[0]
    level = [r.implementation for r in passed[1:] if r.low and best.high and r.low <= best.high]
    text = f"{best.implementation} is the fastest, at {time(best.cold)}"
    if level:
        text = f"{best.implementation} leads at {time(best.cold)}, level with {', '.join(level)}"
        text += " (their intervals overlap)"
    if best.speedup and best.backend not in ("eager", "compile"):
        text += f", {times(best.speedup)} against the better of eager and compile"
    if best.efficiency:
        text += f"; {share(best.efficiency)} of the limit"
    return text + "."


@dataclass(frozen=True, kw_only=True)
class Closeness:
    """One case: a dot for every implementation at its share of the limit."""

    operator: str
    case: str
    direction: str
    marks: tuple[Markup, ...]
    best: Row


def closeness(device: DeviceRecords) -> list[Closeness]:
    """How close each case comes to the limit, for cases with an efficiency."""
    found = []
    for (operator, case, direction), rows in device.points.items():
        rated = [r for r in rows if r.efficiency]
        if not rated:
            continue
        honest = [r for r in rated if not r.suspect] or rated
        best = max(honest, key=lambda r: r.efficiency or 0)
        found.append(
            Closeness(
                operator=operator,
                case=case,
                direction=direction,
                marks=tuple(_mark(r, r is best) for r in sorted(rated, key=lambda r: r is best)),
                best=best,
            )
        )
    return found


def _mark(row: Row, best: bool) -> Markup:
    at = min(100 * (row.efficiency or 0), 110) / 1.1  # the track ends at 110 %
    tip = f"{row.implementation}: {share(row.efficiency)} of the limit, {time(row.cold)}"
    hollow = "hollow" if row.direction != "forward" else ""
    kind = f"{hollow} {'step' if row.step and not best else ''}"
    return svg.marker(row.backend, tip, x=at, y=50, kind=kind)
