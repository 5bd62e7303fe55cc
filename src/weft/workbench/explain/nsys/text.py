"""Tables of a summary for a terminal: devices, kernels, copies, ranges. Each fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.table import Column, Number, Table
from weft.workbench.explain.nsys.summary import RangeRow, Summary
from weft.workbench.report.scales import unit
from weft.workbench.report.table import duration

MAX_ROWS = 15  # kernels and ranges that are shown; --json has all of them
MAX_INNER = 3  # kernels that are shown below a range
FOLD = 16  # characters to which names are folded at least
DASH = "-"


def _time(us: float | None) -> str:
    return DASH if us is None else duration(us)


def _count(value: int) -> Number:
    return Number(f"{value:,}", value)


def tables(summary: Summary) -> Iterator[Table]:
    """Yield the tables that have rows: kernels, devices, copies, ranges."""
    for table in (_kernels(summary), _devices(summary), _copies(summary), _ranges(summary)):
        if table.rows:
            yield table


def _kernels(summary: Summary) -> Table:
    columns = (
        Column("kernel", fold=FOLD),
        Column("count", numeric=True),
        Column("total", numeric=True, unit="us"),
        Column("share", 2, numeric=True),
        Column("median", numeric=True, unit="us"),
        Column("gap", 1, numeric=True, unit="us"),
        Column("latency", 1, numeric=True, unit="us"),
    )
    rows = [
        (
            row.short,
            _count(row.count),
            _time(row.total_us),
            f"{row.share:.1%}",
            _time(row.median_us),
            _time(row.gap_us),
            _time(row.latency_us),
        )
        for row in summary.kernels[:MAX_ROWS]
    ]
    hidden = len(summary.kernels) - MAX_ROWS
    notes = [f"{hidden} more kernels: --json"] if hidden > 0 else []
    return Table(columns, rows, notes=notes)


def _devices(summary: Summary) -> Table:
    columns = (
        Column("device"),
        Column("span", numeric=True, unit="us"),
        Column("busy", numeric=True),
        Column("gaps", numeric=True),
        Column("median gap", numeric=True, unit="us"),
        Column("longest gap", numeric=True, unit="us"),
        Column("between", 1, fold=FOLD),
    )
    rows = [
        (
            f"GPU {row.device}",
            _time(row.span_us),
            f"{row.busy:.1%}",
            _count(row.gaps),
            _time(row.median_gap_us),
            _time(row.longest_gap_us),
            f"{row.after} and {row.before}" if row.after else DASH,
        )
        for row in summary.devices
    ]
    return Table(columns, rows)


def _copies(summary: Summary) -> Table:
    columns = (
        Column("copy", fold=FOLD),
        Column("memory", 1, fold=FOLD),
        Column("count", numeric=True),
        Column("bytes", numeric=True),
        Column("total", numeric=True, unit="us"),
        Column("median", 2, numeric=True, unit="us"),
        Column("rate", numeric=True),
    )
    rows = [
        (
            row.direction,
            f"{row.source or '?'} to {row.target or '?'}" if row.source or row.target else DASH,
            _count(row.count),
            Number(unit(row.nbytes, "B"), row.nbytes),
            _time(row.total_us),
            _time(row.median_us),
            DASH if row.rate is None else Number(unit(row.rate, "B/s"), row.rate),
        )
        for row in summary.copies
    ]
    return Table(columns, rows)


def _ranges(summary: Summary) -> Table:
    columns = (
        Column("range, and its kernels", fold=FOLD),
        Column("count", numeric=True),
        Column("host", numeric=True, unit="us"),
        Column("median", 1, numeric=True, unit="us"),
        Column("kernels", numeric=True),
        Column("their time", numeric=True, unit="us"),
    )
    rows = [cells for row in summary.ranges[:MAX_ROWS] for cells in _range_cells(row)]
    hidden = len(summary.ranges) - MAX_ROWS
    return Table(columns, rows, notes=[f"{hidden} more ranges: --json"] if hidden > 0 else [])


def _range_cells(row: RangeRow) -> Iterator[tuple[str, ...]]:
    times = (_time(row.total_us), _time(row.median_us), _count(row.kernels), _time(row.kernel_us))
    yield row.name, _count(row.count), *times
    for kernel in row.inner[:MAX_INNER]:
        yield f"- {kernel.short}", "", "", "", _count(kernel.count), _time(kernel.us)


def sentences(summary: Summary) -> Iterator[str]:
    """Yield the launch latency in words, and the notes."""
    latency = summary.latency
    if latency.median_us is not None:
        line = f"launch latency: {duration(latency.median_us)} in the median of {latency.launches:,} launches"
        if latency.idle_median_us is not None:
            line += (
                f"; {duration(latency.idle_median_us)} of the {latency.idle_launches:,} onto an idle device"
            )
        yield line
    if latency.unmatched:
        yield f"{latency.unmatched:,} kernels have no API call in the export, and so no latency and no range"
    yield from (f"note: {note}" for note in summary.notes)
