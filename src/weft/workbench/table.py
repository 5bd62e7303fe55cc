"""Tables of records for a terminal; plain text, with no colour and no box, in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from weft.core import Record
from weft.core.record import FAIL, UNSUPPORTED

COMPOSED = (
    "eager",
    "compile",
)  # what a user has without a kernel; speed-ups are against the better
PIPE_WIDTH = 160


def console() -> Console:
    """stdout; wide enough for a whole row where it is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def duration(us: float | None) -> str:
    """Microseconds as a person reads them: ``12.3 us``, ``4.56 ms``, ``1.20 s``.

    >>> duration(1234.5), duration(0.5), duration(None)
    ('1.23 ms', '0.50 us', '')
    """
    if us is None:
        return ""
    for unit, scale in (("s", 1e6), ("ms", 1e3), ("us", 1.0)):
        if us >= scale or unit == "us":
            return f"{_three(us / scale)} {unit}"
    raise AssertionError("unreachable")


def _three(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def speed_up(record: Record, beside: Sequence[Record]) -> float | None:
    """How many times as fast as the better of eager and compile at the same point."""
    composed = [r.timing.cold for r in beside if r.implementation in COMPOSED and r.timing]
    if not composed or not record.timing or not record.timing.cold:
        return None
    return min(composed) / record.timing.cold


def by_point(records: Iterable[Record]) -> Iterator[tuple[tuple[str, str, str], list[Record]]]:
    """Records gathered by (operator, case, direction), in the order they came."""
    for key, group in groupby(records, key=lambda r: (r.operator, r.case, r.direction)):
        yield key, list(group)


def render(records: Sequence[Record], plain: bool = False) -> RenderableType:
    """One table a point, and under it what did not run here, with the reason."""
    parts: list[RenderableType] = []
    for (operator, case, direction), group in by_point(records):
        parts.append(Text(f"{operator}  {case}  {direction}", style="bold"))
        shown = [r for r in group if r.verdict.status != UNSUPPORTED]
        if shown:
            parts.append(_table(shown, plain))
        parts += _not_here([r for r in group if r.verdict.status == UNSUPPORTED])
        parts.append(Text(""))
    return Group(*parts)


def _table(group: Sequence[Record], plain: bool) -> Table:
    table = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("implementation", no_wrap=True)
    by_rate = any(r.rate for r in group)
    for name in ("time", "95 %", "speed-up", "TFLOP/s" if by_rate else "GB/s", "of limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("warm", "host", "first"):
        table.add_column(name, justify="right", no_wrap=True, style="dim")
    table.add_column("notes", overflow="fold")
    best = min((r.timing.cold for r in group if r.timing), default=None)
    for record in group:
        fastest = record.timing is not None and record.timing.cold == best
        style = "bold green" if fastest else "red" if record.verdict.status == FAIL else ""
        table.add_row(*map(escape, _cells(record, group, by_rate)), style=style)
    return table


def _cells(record: Record, group: Sequence[Record], by_rate: bool) -> list[str]:
    timing = record.timing
    if timing is None:
        why = f"FAIL: {record.verdict.reason}" if record.verdict.status == FAIL else ""
        notes = "; ".join(filter(None, (why, *record.flags)))
        return [record.implementation, "-", *[""] * 7, notes]
    low, high = timing.interval
    half = 50 * (high - low) / timing.cold if timing.cold else 0.0
    gain = speed_up(record, group)
    rate = record.tflops if by_rate else record.gbps
    return [
        record.implementation,
        duration(timing.cold),
        f"±{half:.1f} %",
        "" if gain is None else f"{gain:.2f}x",
        "" if rate is None else _three(rate),
        "" if record.efficiency is None else f"{record.efficiency:.1%}",
        duration(timing.warm),
        duration(timing.host),
        duration(timing.first),
        "; ".join(record.flags),
    ]


def _not_here(group: Sequence[Record]) -> list[Text]:
    """Each reason once, with the implementations that it holds for."""
    reasons: dict[str, list[str]] = {}
    for record in group:
        reasons.setdefault(record.verdict.reason, []).append(record.implementation)
    return [
        Text(f"  not run: {', '.join(names)}: {reason}", style="dim")
        for reason, names in reasons.items()
    ]


def footnote(records: Sequence[Record]) -> str:
    """What the columns mean and where they were measured, in two lines."""
    here = records[0].machine
    versions = here.get("versions") or {}
    return (
        "time: median with a cold cache; of limit: the measured floor / time; "
        "speed-up: against the better of eager and compile\n"
        f"{here.get('device')}, torch {versions.get('torch')}, {here.get('date')}"
    )
