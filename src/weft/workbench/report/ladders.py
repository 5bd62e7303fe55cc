"""Ladders: the steps of one operator in one backend, naive to best, drawn as a staircase."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from weft.workbench.report import svg
from weft.workbench.report.devices import DeviceRecords
from weft.workbench.report.rows import Row
from weft.workbench.report.scales import Log, log_axis, time, times


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: its row, and the gain over the timed step before it (2.0 is twice as fast)."""

    row: Row
    gain: float | None


@dataclass(frozen=True, kw_only=True)
class Ladder:
    operator: str
    backend: str
    case: str
    direction: str
    steps: tuple[Step, ...]
    peer: Row | None
    picture: Markup
    says: str

    @property
    def total(self) -> float | None:
        """The first timed step's time over the last one's."""
        timed = [s.row.cold for s in self.steps if s.row.cold]
        return timed[0] / timed[-1] if len(timed) > 1 else None


def ladders(device: DeviceRecords) -> list[Ladder]:
    """The ladders with at least two timed steps: for each, the case with the most bytes first."""
    found = []
    for point, rows in device.points.items():
        for backend in dict.fromkeys(r.backend for r in rows):
            steps = [r for r in rows if r.backend == backend and r.step is not None]
            if sum(r.timed for r in steps) >= 2:
                steps.sort(key=lambda r: (r.step, r.implementation))
                found.append(_ladder(point, backend, steps, rows))
    order = {name: i for i, name in enumerate(device.operators)}
    found.sort(
        key=lambda ld: (
            order[ld.operator],
            ld.backend,
            ld.direction != "forward",
            -max(s.row.nbytes or 0 for s in ld.steps),
        )
    )
    return found


def _ladder(point: tuple[str, str, str], backend: str, rows: list[Row], all_: list[Row]) -> Ladder:
    steps: list[Step] = []
    before: float | None = None
    for row in rows:
        gain = before / row.cold if before and row.cold else None
        steps.append(Step(row=row, gain=gain))
        before = row.cold or before
    peer = next((r for r in all_ if r.implementation == "torch" and r.timed), None)
    return Ladder(
        operator=point[0],
        backend=backend,
        case=point[1],
        direction=point[2],
        steps=tuple(steps),
        peer=peer,
        picture=_staircase(steps, peer),
        says=_sentence(steps),
    )


def _staircase(steps: list[Step], peer: Row | None) -> Markup:
    timed = [(i, s.row, s.row.cold) for i, s in enumerate(steps) if s.row.cold]
    floor = next((r.floor for _, r, _ in timed if r.floor), None)
    lines = [(floor, "floor", "the floor")]
    if peer is not None and peer.cold:
        lines.append((peer.cold, "peer", "torch"))
    heights = [c for _, _, c in timed] + [v for v, _, _ in lines if v]
    heights.append(min(h for h in heights if h) / 1.5)  # room for the floor's words under its line
    axis = log_axis([h for h in heights if h], room=1.35)
    width = 100 / len(steps)
    tread: list[tuple[float, float]] = []
    for i, _, cold in timed:
        y = 100 - axis.at(cold)
        tread += [(i * width, y), ((i + 1) * width, y)]
    backend = steps[0].row.backend
    area = [(tread[0][0], 100.0), *tread, (tread[-1][0], 100.0)]
    drawn = svg.layer(
        svg.path(area, f"stairs-fill b-{backend}", close=True),
        svg.path(tread, f"stairs b-{backend}"),
    )
    parts = [_axis(axis), drawn]
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
            short = time(step.row.cold)
            parts.append(svg.label(short, x=middle, y=y, dy=-10, class_="value mid"))
    return svg.tag("svg", *parts, class_="plot staircase", role="group", aria_label="Ladder")


def _axis(axis: Log) -> Markup:
    parts = []
    for value in axis.ticks(5):
        at = 100 - axis.at(value)
        y = svg.percent(at)
        parts.append(svg.tag("line", x1="0%", x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(svg.label(_round(value), x=0, y=at, dx=-8, dy=4, class_="tick end"))
    return Markup("").join(parts)


def _round(us: float) -> str:
    for size, unit in ((1e6, "s"), (1e3, "ms"), (1.0, "µs")):
        if us >= size:
            return f"{us / size:g} {unit}"
    return f"{us * 1e3:g} ns"


def _level(value: float, kind: str, text: str, axis: Log) -> Markup:
    at = 100 - axis.at(value)
    y = svg.percent(at)
    line = svg.tag("line", x1="0%", x2="100%", y1=y, y2=y, class_=f"level {kind}")
    # Both at the left, where the stairs are high above; the floor's words under its line and the
    # peer's over its own, since the two often nearly meet.
    dy = 15 if kind == "floor" else -5
    return line + svg.label(text, x=0, y=at, dy=dy, dx=6, class_=f"level {kind}")


def _sentence(steps: list[Step]) -> str:
    timed = [s for s in steps if s.row.cold]
    first, last = timed[0].row, timed[-1].row
    assert first.cold is not None and last.cold is not None
    text = f"From {time(first.cold)} to {time(last.cold)} in {len(timed)} steps"
    text += f" ({times(first.cold / last.cold)})"
    gains = [s for s in timed if s.gain is not None]
    if gains:
        top = max(gains, key=lambda s: s.gain or 0)
        idea = f", {top.row.idea.rstrip('.')}" if top.row.idea else ""
        text += f"; the largest single gain, {times(top.gain)}, is step {top.row.step}{idea}"
    return text + "."
