"""Reading what ncu printed: one row a kernel, after lines of its own, with a row of units.

``ncu --csv --page raw`` writes ``==PROF==`` lines, then a header, a row of units, and a row for
each kernel. Numbers may have separators (``1,073,741,824``), exponents, or be ``n/a``. The older
long form (a row for each kernel and metric) is read as well.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_NOISE = re.compile(r"^\s*==(?P<level>\w+)== ?(?P<text>.*)$")
_UNKNOWN = re.compile(r"Failed to find metric (?:regex:\^)?(?P<name>[A-Za-z_][\w\\.]*)")
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIMES = {"n": 1.0, "u": 1e3, "m": 1e6, "": 1e9}  # in ns
_BYTES = re.compile(r"^([KMGT]?)(?:byte|B|sector|request|inst)\b", re.IGNORECASE)
_SECONDS = re.compile(r"^([num]?)s(?:econd)?s?$")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel as the tool tells of it; ``values`` are by the tool's names, in base units."""

    name: str
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Printed:
    """What was in the tool's log. ``unknown`` are metrics that it says there are not."""

    rows: tuple[Row, ...] = ()
    troubles: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def parse(text: str) -> Printed:
    """The kernels in a log of ncu's, its troubles, and the metrics that it does not know."""
    noise = [m for m in map(_NOISE.match, text.splitlines()) if m]
    found = (m["text"].strip() for m in noise if m["level"] in ("ERROR", "WARNING"))
    unknown = (m["name"] for m in _UNKNOWN.finditer(text))
    return Printed(
        rows=tuple(_rows(text)),
        troubles=tuple(dict.fromkeys(filter(None, found))),
        unknown=tuple(dict.fromkeys(n.replace("\\", "").rstrip(".") for n in unknown)),
    )


def _rows(text: str) -> list[Row]:
    lines = text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if _is_header(line)]
    found: list[Row] = []
    for start, end in pairwise([*starts, len(lines)]):
        body = "".join(line for line in lines[start:end] if not _NOISE.match(line))
        head, *rows = list(csv.reader(io.StringIO(body)))
        whole = [dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)]
        found += _long(whole) if "Metric Name" in head else _wide(head, whole)
    return found


def _is_header(line: str) -> bool:
    return line.startswith(('"ID",', "ID,")) and "Kernel Name" in line


def _wide(head: Sequence[str], rows: Sequence[Mapping[str, str]]) -> list[Row]:
    metrics = [name for name in head if "__" in name]
    units: Mapping[str, str] = {}
    found = []
    for row in rows:
        if not row["ID"].strip():  # the row of units
            units = row
            continue
        read = ((m, number(row[m], units.get(m, ""))) for m in metrics)
        found.append(_row(row, {m: v for m, v in read if v is not None}))
    return found


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
    """Of the columns that are no metric: what was launched. The host's name stays behind."""
    return Row(
        name=row["Kernel Name"].strip(),
        grid=_dimensions(row.get("Grid Size", "")),
        block=_dimensions(row.get("Block Size", "")),
        values=values,
    )


def _dimensions(text: str) -> tuple[int, ...]:
    """``(256, 1, 1)`` as numbers; the numbers have no separators here."""
    return tuple(int(n) for n in re.findall(r"\d+", text))[:3]


def number(text: str, unit: str = "") -> float | None:
    """A value in base units (bytes, sectors, ns, %); None for ``n/a`` and what is no number."""
    plain = text.strip().removeprefix("(!)").replace(",", "").strip()
    try:
        value = float(plain)
    except ValueError:
        return None
    return value * _scale(unit.strip()) if math.isfinite(value) else None


def _scale(unit: str) -> float:
    if found := _SECONDS.match(unit):
        return _TIMES[found[1]]
    if found := _BYTES.match(unit):
        return _PREFIXES[found[1].upper()]
    return 1.0
