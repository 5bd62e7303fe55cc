"""Ladders: the steps of one operator in one backend, naive to best, as a staircase plot."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from weft.core.record import UNSUPPORTED
from weft.workbench.report import svg
from weft.workbench.report.device_records import DeviceRecords, Row
from weft.workbench.report.scales import LogAxis, log_axis, time, times


@dataclass(frozen=True, kw_only=True)
class Step:
    """Step of a ladder: its row, and its speed-up over the timed step before it (2.0 is twice as fast)."""

    row: Row
    gain: float | None


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """All steps of one operator in one backend at one case; ``peer`` is torch's own time there."""

    operator: str
    backend: str
    case: str
    direction: str
    steps: tuple[Step, ...]
    peer: Row | None
    picture: Markup
    summary: str


def ladders(device: DeviceRecords) -> list[Ladder]:
    """Return the ladders with at least two timed steps; of each, the case with the most bytes comes first."""
    result = []
    for point, rows in device.points.items():
        for backend in dict.fromkeys(r.backend for r in rows):
            # An operator may have a ladder for each dtype: a step that does not take this case is of another.
            steps = [
                r for r in rows if r.backend == backend and r.step is not None and r.status != UNSUPPORTED
            ]
            if sum(r.timed for r in steps) >= 2:
                steps.sort(key=lambda r: (r.step, r.implementation))
                result.append(_ladder(point, backend, steps, rows))
    # Within a ladder forward comes first, then the case with the most bytes.
    order = {name: i for i, name in enumerate(device.operators)}
    result.sort(
        key=lambda ld: (
            order[ld.operator],
            ld.backend,
            ld.direction != "forward",
            -max(s.row.nbytes or 0 for s in ld.steps),
        )
    )
    return result


def _ladder(point: tuple[str, str, str], backend: str, step_rows: list[Row], point_rows: list[Row]) -> Ladder:
    steps: list[Step] = []
    previous: float | None = None
    for row in step_rows:
        gain = previous / row.cold if previous and row.cold else None
        steps.append(Step(row=row, gain=gain))
        previous = row.cold or previous  # an untimed step does not break the chain of gains
    peer = next((r for r in point_rows if r.implementation == "torch" and r.timed), None)
    return Ladder(
        operator=point[0],
        backend=backend,
        case=point[1],
        direction=point[2],
        steps=tuple(steps),
        peer=peer,
        picture=_staircase(steps, peer),
        summary=_summary(steps),
    )


def _staircase(steps: list[Step], peer: Row | None) -> Markup:
    timed = [(i, s.row, s.row.cold) for i, s in enumerate(steps) if s.row.cold]
    limit = next((r.limit for _, r, _ in timed if r.limit), None)
    lines = [(limit, "limit", "limit")]
    if peer is not None and peer.cold:
        lines.append((peer.cold, "peer", "torch"))
    heights = [c for _, _, c in timed] + [v for v, _, _ in lines if v]
    heights.append(min(h for h in heights if h) / 1.5)  # space for the label below the limit's line
    axis = log_axis([h for h in heights if h], margin=1.35)
    width = 100 / len(steps)
    tread: list[tuple[float, float]] = []
    for i, _, cold in timed:
        y = 100 - axis.at(cold)
        # Two points for each step make a horizontal tread; the path joins treads by vertical lines.
        tread += [(i * width, y), ((i + 1) * width, y)]
    backend = steps[0].row.backend
    area = [(tread[0][0], 100.0), *tread, (tread[-1][0], 100.0)]
    stairs = svg.layer(
        svg.path(area, f"stairs-fill b-{backend}", close=True),
        svg.path(tread, f"stairs b-{backend}"),
    )
    parts = [_axis(axis), stairs]
    for value, kind, text in lines:
        if value:
            parts.append(_level(value, kind, f"{text} {time(value)}", axis))
    for i, step in enumerate(steps):
        middle = (i + 0.5) * width
        number = str(step.row.step)
        parts.append(svg.label(number, x=middle, y=100, dy=18, class_="tick mid"))
        if step.row.cold:
            y = 100 - axis.at(step.row.cold)
            tip = f"{step.row.implementation}: {time(step.row.cold)}"
            parts.append(svg.marker(backend, tip, x=middle, y=y))
            parts.append(svg.label(time(step.row.cold), x=middle, y=y, dy=-10, class_="value mid"))
    return svg.tag("svg", *parts, class_="plot staircase", role="group", aria_label="Ladder")


def _axis(axis: LogAxis) -> Markup:
    parts = []
    for value in axis.ticks(lambda ticks: len(ticks) <= 9):
        height = 100 - axis.at(value)
        y = svg.percent(height)
        parts.append(svg.tag("line", x1="0%", x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(svg.label(_round_time(value), x=0, y=height, dx=-8, dy=4, class_="tick end"))
    return Markup("").join(parts)


def _round_time(us: float) -> str:
    for size, unit in ((1e6, "s"), (1e3, "ms"), (1.0, "µs")):
        if us >= size:
            return f"{us / size:g} {unit}"
    return f"{us * 1e3:g} ns"


def _level(value: float, kind: str, text: str, axis: LogAxis) -> Markup:
    height = 100 - axis.at(value)
    y = svg.percent(height)
    line = svg.tag("line", x1="0%", x2="100%", y1=y, y2=y, class_=f"level {kind}")
    # Both labels are at the left, where the stairs are far above. The limit's is below its line and the
    # peer's above, because the two lines often nearly coincide.
    dy = 15 if kind == "limit" else -5
    return line + svg.label(text, x=0, y=height, dy=dy, dx=6, class_=f"level {kind}")


def _summary(steps: list[Step]) -> str:
    timed = [s for s in steps if s.row.cold]
    first, last = timed[0].row, timed[-1].row
    assert first.cold is not None and last.cold is not None
    text = f"From {time(first.cold)} to {time(last.cold)} in {len(timed)} steps"
    text += f" ({times(first.cold / last.cold)})"
    gains = [s for s in timed if s.gain is not None]
    if gains:
        largest = max(gains, key=lambda s: s.gain or 0)
        idea = f", {largest.row.idea.rstrip('.')}" if largest.row.idea else ""
        text += f"; the largest single gain, {times(largest.gain)}, is step {largest.row.step}{idea}"
    return text + "."
