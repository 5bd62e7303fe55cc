"""Tables as data: columns with priorities, rows of text, and notes. ``weft.cli.output`` prints them.

A cell is text. A cell that shows a number is a :class:`Number`, so that CSV can have the number itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

ESSENTIAL = 0  # priority of the columns that are never left out
# A number by itself: digits of a name such as cuda/03-shared, fp32-64x64 or sm_90 are part of that name.
NUMBER = re.compile(r"(?<![\w./^-])[-+±]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w/^]|[.-]\w)")


class Number(str):
    """Text of a number, and the number itself as ``value``; None where there is no number.

    >>> Number("1.23 ms", 1234.5).value
    1234.5
    """

    value: float | None

    def __new__(cls, text: str, value: float | None) -> Number:
        """Return ``text`` with its ``value``, in the unit of the column."""
        number = super().__new__(cls, text)
        number.value = value
        return number


@dataclass(frozen=True)
class Column:
    """Column of a table.

    On a terminal that is too narrow, the columns of the highest ``priority`` are left out first, all those
    of one priority together. ``numeric`` columns are right-aligned and never folded. Text is folded
    only where ``fold`` is set: to that many characters at least. ``unit`` is that of the numbers in CSV.
    """

    name: str
    priority: int = ESSENTIAL
    numeric: bool = False
    fold: int | None = None
    unit: str = ""
    style: str = ""


@dataclass(frozen=True)
class Table:
    """Table of text. ``styles`` has the style of each row, in the terms of rich; empty: no styles.

    ``notes`` are sentences that belong under the table.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    styles: Sequence[str] = ()

    def column(self, name: str) -> list[str]:
        """Return the cells of a column. Raise ValueError for an unknown name."""
        index = [c.name for c in self.columns].index(name)
        return [row[index] for row in self.rows]


def plain_table(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: Collection[str] = (),
    priorities: Mapping[str, int] | None = None,
    fold: int | None = None,
) -> Table:
    """Return a table by the names of its columns; those not in ``numeric`` are folded from ``fold`` on.

    ``priorities`` has the columns that can be left out; the others are essential.
    """
    order = priorities or {}
    columns = [
        Column(
            name, order.get(name, ESSENTIAL), numeric=name in numeric, fold=None if name in numeric else fold
        )
        for name in names
    ]
    return Table(columns, rows)


def group_notes(notes: Iterable[str]) -> dict[str, list[str]]:
    """Group the notes that differ only in their numbers: a text with the range of each number, to its notes.

    >>> group_notes(["off by 3 of 9", "no GPU", "off by 12 of 9", "no GPU"])
    {'off by 3 to 12 of 9': ['off by 3 of 9', 'off by 12 of 9'], 'no GPU': ['no GPU']}
    """
    groups: dict[str, list[str]] = {}
    for note in dict.fromkeys(notes):
        # \0 stands for a number: no printable text has it.
        groups.setdefault(NUMBER.sub("\0", note), []).append(note)
    return {_with_ranges(template, group): group for template, group in groups.items()}


def _with_ranges(template: str, group: Sequence[str]) -> str:
    """Return the template with the range of each number in the place of its mark."""
    for numbers in zip(*(NUMBER.findall(note) for note in group), strict=True):
        low, high = min(numbers, key=_value), max(numbers, key=_value)
        span = low if _value(low) == _value(high) else f"{low} to {high}"
        template = template.replace("\0", span, 1)
    return template


def _value(number: str) -> float:
    return float(number.replace(",", "").lstrip("±"))
