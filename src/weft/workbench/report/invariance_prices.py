"""Markdown table of what batch invariance costs, from ``results/<device>/batch-invariance.ndjson``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.core.implementation import without_suffix
from weft.core.record import Record, read
from weft.workbench.report.markdown import RESULTS, dates_and_commits, table
from weft.workbench.report.scales import time
from weft.workbench.report.table import by_point, invariance_price

FILE = "batch-invariance.ndjson"
COMMAND = f"weft bench softmax layer_norm --impl cuda --batch-invariant --save results/<device>/{FILE}"
MISSING = f"No record is committed yet: `{COMMAND}` measures it."


def markdown(results: Path = RESULTS) -> str:
    """Return a table for each device with such records: time with and without batch invariance, and price."""
    parts = []
    for path in sorted(results.glob(f"*/{FILE}")):
        records, _ = read(path)
        rows = list(_rows(records))
        if rows:
            machine = records[0].machine
            head = f"**{machine.get('device')}**, {dates_and_commits([machine])}."
            columns = ("operator", "case", "direction", "implementation", "time", "batch invariant", "price")
            parts.append(f"{head}\n\n{table(columns, rows, '    :::')}")
    return "\n\n".join(parts) or MISSING


def _rows(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    for (operator, case, direction), group in by_point(records):
        for record in group:
            price = invariance_price(record, group)
            if price is None or record.timing is None:
                continue
            base = without_suffix(record.implementation)
            without = next(r.timing.cold for r in group if r.implementation == base and r.timing)
            times = (time(without), time(record.timing.cold))
            yield operator, f"`{case}`", direction, base, *times, f"{price:.2f}×"
