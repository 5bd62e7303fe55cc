"""What the two roofline plots share: the grid, the marks' labels, and lanes between backends."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from weft.core.implementation import BACKENDS
from weft.workbench.report import svg
from weft.workbench.report.rows import Row
from weft.workbench.report.scales import Linear, Log, share, tick_label, time, unit

APART = 14  # percent of the width that a name takes on a phone
LANE = 0.7  # percent of the width between the lanes that keep one backend from hiding another


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A drawn plot, its axes' names, the sentence that says what to see, and notes."""

    picture: Markup
    title: str
    across: str
    up: str
    says: str
    notes: tuple[str, ...]


def grid(x_axis: Log, y_axis: Log | Linear) -> Markup:
    """Lines and numbers of both axes."""
    parts: list[Markup] = []
    for value in x_axis.ticks(6):
        at = svg.percent(x_axis.at(value))
        parts.append(svg.tag("line", x1=at, x2=at, y1="0%", y2="100%", class_="grid"))
        text = tick_label(value)
        parts.append(svg.label(text, x=x_axis.at(value), y=100, dy=18, class_="tick mid"))
    for value in y_axis.ticks(6):
        height = 100 - y_axis.at(value)
        at = svg.percent(height)
        parts.append(svg.tag("line", x1="0%", x2="100%", y1=at, y2=at, class_="grid"))
        parts.append(svg.label(tick_label(value), x=0, y=height, dx=-8, dy=4, class_="tick end"))
    return Markup("").join(parts)


def lane(row: Row) -> float:
    """How far aside this row's backend stands, in percent of the plot's width."""
    number = BACKENDS.index(row.backend) - 2.5 if row.backend in BACKENDS else 3.5
    return number * LANE


def mark(row: Row, x: float, y: float) -> Markup:
    """The row's marker at a place in percent from the left and the top."""
    tip = (
        f"{row.operator} · {row.implementation} · {row.case} · {row.direction}: {time(row.cold)}, "
        f"{reached(row)}, {share(row.efficiency)} of the limit"
    )
    hollow = "hollow" if row.direction != "forward" else ""
    return svg.marker(row.backend, tip, x=x, y=y, kind=f"{hollow} {'step' if row.step else ''}")


def bandwidth(row: Row) -> float | None:
    """Compulsory bytes a second."""
    return row.nbytes / row.cold * 1e6 if row.nbytes and row.cold else None


def reached(row: Row) -> str:
    """The rates a row reached, in words."""
    rates = [unit(bandwidth(row), "B/s")]
    if row.flops and row.flops > 0 and row.cold:
        rates.append(unit(row.flops / row.cold * 1e6, "FLOP/s"))
    return ", ".join(rates)


def names(columns: set[tuple[float, str]], *, top: bool = False) -> list[Markup]:
    """Names at the foot of their columns, or at their top; ``columns`` are places in percent, each
    with a name. Neighbours nearer than ``APART`` share a place."""
    groups: list[list[tuple[float, str]]] = []
    for x, name in sorted(columns):
        near = x - groups[-1][-1][0] if groups else 100.0
        if groups and (near < APART or (near < 2 * APART and groups[-1][-1][1] == name)):
            groups[-1].append((x, name))
        else:
            groups.append([(x, name)])
    found = []
    for group in groups:
        x = sum(at for at, _ in group) / len(group)
        side = "start" if x < 8 else "end" if x > 92 else "mid"
        words = list(dict.fromkeys(name for _, name in group))[:4]
        for line, name in enumerate(words if top else reversed(words)):
            y, dy = (0, 13 + 13 * line) if top else (100, -8 - 13 * line)
            found.append(svg.label(name, x=x, y=y, dy=dy, class_=f"column {side}"))
    return found


def nearest(rows: list[Row], axis: str) -> str:
    """The sentence that names the row with the largest share of its limit."""
    rated = [r for r in rows if r.efficiency and not r.suspect]
    if not rated:
        return ""
    best = max(rated, key=lambda r: r.efficiency or 0)
    return (
        f" Nearest to {axis}: {best.implementation} in {best.operator} {best.case} "
        f"{best.direction}, at {share(best.efficiency)} of the limit."
    )


def common_notes(rows: list[Row]) -> list[str]:
    """What a reader of either plot must know."""
    notes = ["Backends at one place are set a little apart, so that none hides another."]
    if any(r.direction != "forward" for r in rows):
        notes.append("Hollow marks are backward passes.")
    if any(r.step for r in rows):
        notes.append("Faint marks are the steps of a ladder.")
    return notes


def derived_note() -> str:
    return "These records carry no measured ceilings: the roofs are worked back from their floors."
