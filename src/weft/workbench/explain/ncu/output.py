"""Parser of ncu's output: one row a kernel.

``ncu --csv --page raw`` writes ``==PROF==`` lines, then a header, a row of units, and a row for each kernel.
Numbers may have separators (``1,073,741,824``) or exponents, or be ``n/a``. The long form of older versions
(a row for each kernel and metric) is read as well.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_MESSAGE = re.compile(r"^\s*==(?P<level>\w+)== ?(?P<text>.*)$")
_UNKNOWN = re.compile(r"Failed to find metric (?:regex:\^)?(?P<name>[A-Za-z_][\w\\.]*)")
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_NANOSECONDS = {"n": 1.0, "u": 1e3, "m": 1e6, "": 1e9}  # in ns
_BYTES = re.compile(r"^([KMGT]?)(?:byte|B|sector|request|inst)\b", re.IGNORECASE)
_SECONDS = re.compile(r"^([num]?)s(?:econd)?s?$")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Kernel in the tool's output; ``values`` are by the tool's names, in base units."""

    name: str
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ParsedOutput:
    """Content of the tool's log; ``unknown`` are metrics that it does not know."""

    rows: tuple[Row, ...] = ()
    troubles: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def parse(text: str) -> ParsedOutput:
    """Parse a log of ncu: its kernels, its errors and warnings, and the metrics that it does not know."""
    messages = [m for m in map(_MESSAGE.match, text.splitlines()) if m]
    troubles = (m["text"].strip() for m in messages if m["level"] in ("ERROR", "WARNING"))
    unknown = (m["name"] for m in _UNKNOWN.finditer(text))
    return ParsedOutput(
        rows=tuple(_rows(text)),
        troubles=tuple(dict.fromkeys(filter(None, troubles))),
        unknown=tuple(dict.fromkeys(n.replace("\\", "").rstrip(".") for n in unknown)),
    )


def _rows(text: str) -> list[Row]:
    lines = text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if _is_header(line)]
    parsed: list[Row] = []
    # A log can have several tables, each with a header of its own.
    for start, end in pairwise([*starts, len(lines)]):
        # The tool writes its messages between the rows of the table.
        body = "".join(line for line in lines[start:end] if not _MESSAGE.match(line))
        head, *rows = list(csv.reader(io.StringIO(body)))
        # A line cut off at the end of a torn log has fewer fields.
        complete = [dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)]
        parsed += _long(complete) if "Metric Name" in head else _wide(head, complete)
    return parsed


def _is_header(line: str) -> bool:
    return line.startswith(('"ID",', "ID,")) and "Kernel Name" in line


def _wide(head: Sequence[str], rows: Sequence[Mapping[str, str]]) -> list[Row]:
    # A metric is named unit__quantity (dram__bytes_read.sum); the columns about the launch are not.
    metrics = [name for name in head if "__" in name]
    units: Mapping[str, str] = {}
    parsed = []
    for row in rows:
        # The row of units is the only one without an ID.
        if not row["ID"].strip():
            units = row
            continue
        values = ((m, number(row[m], units.get(m, ""))) for m in metrics)
        parsed.append(_row(row, {m: v for m, v in values if v is not None}))
    return parsed


def _long(rows: Sequence[Mapping[str, str]]) -> list[Row]:
    kernels: dict[str, dict[str, float]] = {}
    firsts: dict[str, Mapping[str, str]] = {}
    for row in rows:
        values = kernels.setdefault(row["ID"], {})
        firsts.setdefault(row["ID"], row)
        value = number(row["Metric Value"], row.get("Metric Unit", ""))
        if value is not None and "__" in row["Metric Name"]:
            values[row["Metric Name"]] = value
    return [_row(firsts[key], values) for key, values in kernels.items()]


def _row(row: Mapping[str, str], values: Mapping[str, float]) -> Row:
    """Return a row with the launch from the columns that are no metric; the host's name is dropped."""
    return Row(
        name=row["Kernel Name"].strip(),
        grid=_dimensions(row.get("Grid Size", "")),
        block=_dimensions(row.get("Block Size", "")),
        values=values,
    )


def _dimensions(text: str) -> tuple[int, ...]:
    """Parse ``(256, 1, 1)``; the numbers have no separators here."""
    return tuple(int(n) for n in re.findall(r"\d+", text))[:3]


def number(text: str, unit: str = "") -> float | None:
    """Parse a value into base units (bytes, sectors, ns, %); None for ``n/a`` and any other text."""
    digits = text.strip().removeprefix("(!)").replace(",", "").strip()
    try:
        value = float(digits)
    except ValueError:
        return None
    return value * _scale(unit.strip()) if math.isfinite(value) else None


def _scale(unit: str) -> float:
    if match := _SECONDS.match(unit):
        return _NANOSECONDS[match[1]]
    if match := _BYTES.match(unit):
        return _PREFIXES[match[1].upper()]
    return 1.0
