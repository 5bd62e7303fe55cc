"""Tables of records as data: one for each point, and one of all points for CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from weft.core import Record
from weft.core.implementation import without_suffix
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.core.table import Column, Number, Table
from weft.workbench.report.device_records import COMPOSED

VERDICTS = {PASS: "pass", FAIL: "FAIL", UNSUPPORTED: "not run"}
NONE = Number("", None)


def duration(us: float | None) -> Number:
    """Return microseconds as readable text with their value: ``12.3 us``, ``4.56 ms``, ``1.20 s``.

    >>> duration(1234.5), duration(0.5), duration(None)
    ('1.23 ms', '0.50 us', '')
    """
    if us is None:
        return NONE
    for unit, scale in (("s", 1e6), ("ms", 1e3), ("us", 1.0)):
        if us >= scale or unit == "us":
            return Number(f"{_three_digits(us / scale)} {unit}", us)
    raise AssertionError("unreachable")


def _three_digits(value: float) -> str:
    """Return a number with at least three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def speed_up(record: Record, group: Sequence[Record]) -> float | None:
    """Return the speed-up over the faster of eager and compile among the records of the same point."""
    composed = [r.timing.cold for r in group if r.implementation in COMPOSED and r.timing]
    if not composed or not record.timing or not record.timing.cold:
        return None
    return min(composed) / record.timing.cold


def invariance_price(record: Record, group: Sequence[Record]) -> float | None:
    """Return the time of a batch-invariant variant divided by that of its implementation at the same point.

    None for other records, and where either was not timed.
    """
    base = without_suffix(record.implementation)
    if base == record.implementation or not record.timing:
        return None
    without = next((r.timing for r in group if r.implementation == base and r.timing), None)
    return record.timing.cold / without.cold if without and without.cold else None


def by_point(records: Iterable[Record]) -> Iterator[tuple[tuple[str, str, str], list[Record]]]:
    """Yield consecutive records of one (operator, case, direction) together."""
    for key, group in groupby(records, key=lambda r: (r.operator, r.case, r.direction)):
        yield key, list(group)


def tables(records: Sequence[Record]) -> Iterator[Table]:
    """Yield a table for each point, with its flags, failures and what did not run as notes."""
    for (operator, case, direction), group in by_point(records):
        shown = [r for r in group if r.verdict.status != UNSUPPORTED]
        best = min((r.timing.cold for r in shown if r.timing), default=None)
        # Operators with a matrix rate are bound by FLOPs, all others by bytes.
        by_rate = any(r.rate for r in group)
        optional = optional_columns(group)
        yield Table(
            columns=_columns("TFLOP/s" if by_rate else "GB/s", optional) if shown else (),
            rows=[_cells(r, group, by_rate, optional) for r in shown],
            title=f"{operator}  {case}  {direction}",
            notes=_notes(group),
            styles=[_style(r, best) for r in shown],
        )


def csv_table(records: Sequence[Record]) -> Table:
    """Return one table of all points, also of what did not run; its last column has flags and reasons."""
    point = [Column(name) for name in ("operator", "case", "direction")]
    optional = optional_columns(records)
    rows = []
    for key, group in by_point(records):
        for r in group:
            notes = "; ".join(filter(None, (r.verdict.reason, *r.flags, r.doubt)))
            cells = _cells(r, group, by_rate=False, optional=optional)
            rows.append((*key, *cells, _number(r.tflops), notes))
    return Table((*point, *_columns("GB/s", optional), Column("TFLOP/s"), Column("notes")), rows)


@dataclass(frozen=True)
class OptionalColumn:
    """Column of a table in which a record has a figure for it: ``figure(record, group)``, or None."""

    column: Column
    figure: Callable[[Record, Sequence[Record]], float | None]
    text: Callable[[float], str]
    meaning: str


def _sustained(name: str) -> Callable[[Record, Sequence[Record]], float | None]:
    def figure(record: Record, _: Sequence[Record]) -> float | None:
        sustained = record.timing.clocks.get("sustained") if record.timing else None
        return sustained[name] if sustained else None

    return figure


OPTIONAL = (
    OptionalColumn(
        Column("price", 1, numeric=True),
        invariance_price,
        lambda ratio: f"{ratio:.2f}x",
        "price = time / time without batch invariance",
    ),
    OptionalColumn(
        Column("sustained", 2, numeric=True, unit="us"),
        _sustained("us"),
        duration,
        "sustained = time of calls back to back for a second, at the power limit",
    ),
    OptionalColumn(
        Column("SM MHz", 3, numeric=True),
        _sustained("sm_mhz"),
        lambda mhz: f"{mhz:.0f}",
        "SM MHz = clock then",
    ),
    OptionalColumn(
        Column("mJ", 3, numeric=True),
        lambda record, group: _times(1e3, _sustained("joules")(record, group)),
        _three_digits,
        "mJ = energy of the card for each call then",
    ),
)


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def optional_columns(records: Sequence[Record]) -> list[OptionalColumn]:
    """Return the optional columns for which one of these records has a figure."""
    groups = [group for _, group in by_point(records)]
    return [o for o in OPTIONAL if any(o.figure(r, group) is not None for group in groups for r in group)]


def _columns(rate: str, optional: Sequence[OptionalColumn]) -> tuple[Column, ...]:
    """Return the columns of timed records; the verdict, the time and its share of the limit come first."""
    return (
        Column("implementation"),
        Column("verdict"),
        Column("time", numeric=True, unit="us"),
        Column("of limit", numeric=True, unit="%"),
        Column("speed-up", 1, numeric=True),
        *(o.column for o in optional),
        Column("95 %", 2, numeric=True, unit="%"),
        Column(rate, 3, numeric=True),
        Column("warm", 5, numeric=True, unit="us", style="dim"),
        Column("host", 4, numeric=True, unit="us", style="dim"),
        Column("first", 6, numeric=True, unit="us", style="dim"),
    )


def _cells(
    record: Record, group: Sequence[Record], by_rate: bool, optional: Sequence[OptionalColumn]
) -> tuple[str, ...]:
    names = (record.implementation, VERDICTS[record.verdict.status])
    timing = record.timing
    if timing is None:
        return *names, Number("-", None), *[NONE] * (7 + len(optional))
    low, high = timing.interval
    # 50, not 100: half of the interval's width, in percent of the time.
    half_width = 50 * (high - low) / timing.cold if timing.cold else 0.0
    gain = speed_up(record, group)
    figures = [(o, o.figure(record, group)) for o in optional]
    percent = None if record.efficiency is None else 100 * record.efficiency
    return (
        *names,
        duration(timing.cold),
        NONE if percent is None else Number(f"{'~' if record.doubt else ''}{percent:.1f} %", percent),
        NONE if gain is None else Number(f"{gain:.2f}x", gain),
        *(NONE if figure is None else Number(o.text(figure), figure) for o, figure in figures),
        Number(f"±{half_width:.1f} %", half_width),
        _number(record.tflops if by_rate else record.gbps),
        duration(timing.warm),
        duration(timing.host),
        duration(timing.first),
    )


def _number(value: float | None) -> Number:
    return NONE if value is None else Number(_three_digits(value), value)


def _style(record: Record, best: float | None) -> str:
    if record.verdict.status == FAIL:
        return "red"
    return "bold green" if record.timing is not None and record.timing.cold == best else ""


def _notes(group: Sequence[Record]) -> list[str]:
    """Return each failure, flag and reason once, with the implementations that it applies to."""
    notes: dict[tuple[str, str], list[str]] = {}
    for record in group:
        reason, status = record.verdict.reason, record.verdict.status
        entries = [("", flag) for flag in record.flags]
        if status == FAIL:
            entries.insert(0, ("failed: ", reason))
        elif status == UNSUPPORTED:
            # Some reasons begin with their own verb: "not timed (no GPU): ...".
            entries.append(("" if reason.startswith("not ") else "not run: ", reason))
        for entry in entries:
            notes.setdefault(entry, []).append(record.implementation)
    order = sorted(notes.items(), key=lambda item: item[0][0] != "failed: ")
    return [f"{label}{', '.join(names)}: {text}" for (label, text), names in order]


def footnote(records: Sequence[Record]) -> str:
    """Return the meaning of the columns, and the machine, in two lines."""
    machine = records[0].machine
    versions = machine.get("versions") or {}
    optional = "".join(f"; {o.meaning}" for o in optional_columns(records))
    return (
        "time = median with a cold cache; of limit = shortest possible time / measured time; "
        f"speed-up = vs the faster of eager and compile{optional}\n"
        f"{machine.get('device')}, torch {versions.get('torch')}, {machine.get('date')}"
    )
