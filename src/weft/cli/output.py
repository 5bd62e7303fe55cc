"""Output that commands share: tables on stdout and log lines on stderr."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from weft.core.errors import WeftError
from weft.core.table import ESSENTIAL, Number, Table
from weft.core.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PIPE_WIDTH = 160  # columns of running text in a pipe, which has no width of its own
GAP = 2  # blanks between two columns
UNIT = r"(?:%|bits?|[munkµ]?s|[KMGT]?i?B(?:/s)?|[GT]FLOP/s)(?![\w/])"
# Parts of a piece: a name such as cuda/03-shared is not folded before a digit, nor is GB/s folded.
BODY = r"(?:[^\s/,:-]|[/,:-](?=\d)|/(?=s\b))"
# Pieces between which text can be folded. A number and its unit are one piece, and so is --option.
PIECE = re.compile(rf"\s+|[-+±]?\d[\d.,]*(?:e[-+]?\d+)?(?: {UNIT})?{BODY}*[/,:-]*|[^\s\w]*{BODY}+[/,:-]*|\S")


def log(line: str) -> None:
    """Print a line to stderr at once, also in a pipe; what is not visible is escaped."""
    print(printable(line, keep="\n\t"), file=sys.stderr, flush=True)


def show_text(text: str, *, end: str = "\n") -> None:
    """Print text that a model or a file made to stdout at once: on a terminal it cannot steer it."""
    print(printable(text, keep="\n\t") if sys.stdout.isatty() else text, end=end, flush=True)


def console() -> Console:
    """Return a console on stdout that is wide enough for a long line in a pipe."""
    from rich.console import Console

    stdout = Console(highlight=False)
    return stdout if stdout.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def only_one_format(**formats: bool) -> None:
    """Raise :class:`WeftError` if several output formats are requested, such as ``json`` and ``csv``."""
    requested = [f"--{name}" for name, is_requested in formats.items() if is_requested]
    if len(requested) > 1:
        options = " or ".join(f"--{name}" for name in formats)
        raise WeftError("only one output format", expected=options, got=" and ".join(requested))


def show_table(table: Table, *, options: Collection[str] = ("json",)) -> None:
    """Print a table to stdout so that no line is longer than the terminal's width, and its notes below.

    Numbers are never cut or folded. If the columns do not fit, those of the lowest importance are left
    out, and a line under the table names them and ``options``, the formats of the command that have all
    columns. If not even the essential columns fit, each row is a block of lines. A pipe gets all columns.
    """
    stdout = console()
    width = stdout.width if stdout.is_terminal else None
    for line in table_lines(table, width, options):
        stdout.print(line, soft_wrap=True)


def fits(table: Table) -> bool:
    """Return whether the essential columns of a table fit the terminal side by side; True in a pipe."""
    stdout = console()
    return not stdout.is_terminal or bool(_fitting_columns(table, stdout.width))


def show_notes(notes: Iterable[str], *, indent: str = "  ", style: str = "dim") -> None:
    """Print notes to stdout, folded at the terminal's width; further lines of a note are indented."""
    from rich.text import Text

    stdout = console()
    for note in notes:
        note = printable(note, keep="\n")
        for line in fold(note, stdout.width, indent) if stdout.is_terminal else [note]:
            stdout.print(Text(line, style), soft_wrap=True)


def show_command(command: str) -> None:
    """Print a command to stdout; on a narrow terminal in several lines that a shell reads as one command."""
    import textwrap

    stdout = console()
    lines = [command]
    if stdout.is_terminal:
        # A word of a command, such as a file name, is never broken; two columns are left for the backslash.
        lines = textwrap.wrap(
            command,
            stdout.width - 2,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    for line in (*(f"{line} \\" for line in lines[:-1]), lines[-1]):
        stdout.print(line, markup=False, soft_wrap=True)


def print_csv(table: Table) -> None:
    """Print a table to stdout as CSV: all columns, numbers as such with their unit in the header."""
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(f"{c.name} ({c.unit})" if c.unit else c.name for c in table.columns)
    for row in table.rows:
        writer.writerow(c.value if isinstance(c, Number) else printable(c, keep="\n") for c in row)


def table_lines(table: Table, width: int | None, options: Collection[str] = ("json",)) -> Iterator[Text]:
    """Yield the lines of a table with its title and notes; ``width`` None means unlimited."""
    from rich.text import Text

    table = _visible(table)
    if table.title:
        yield from (Text(line, "bold") for line in fold(table.title, width))
    shown = _fitting_columns(table, width)
    if shown:
        yield from _grid(table, shown, width)
    else:
        shown = [i for i, c in enumerate(table.columns) if c.priority == ESSENTIAL]
        yield from _blocks(table, shown, width)
    hidden = [c.name for i, c in enumerate(table.columns) if i not in shown and c.name]
    if hidden and table.rows:
        *sources, last = "a wider terminal", *(f"--{name}" for name in options)
        shows = f"{', '.join(sources)} or {last} shows" if sources else f"{last} shows"
        note = f"columns left out: {', '.join(hidden)} ({shows} them)"
        yield from (Text(line, "dim") for line in fold(note, width))
    for note in table.notes:
        yield from (Text(line, "dim") for line in fold(note, width, "  "))


def _visible(table: Table) -> Table:
    """Return the table with the texts of candidates and files made printable."""
    rows = [[printable(text, keep="\n") for text in row] for row in table.rows]
    notes = [printable(note) for note in table.notes]
    return replace(table, rows=rows, notes=notes, title=printable(table.title))


def _fitting_columns(table: Table, width: int | None) -> list[int]:
    """Return the indices of the columns that fit; none if not even the essential ones do."""
    shown = list(range(len(table.columns)))
    if width is None:
        return shown
    while _needed(shown, [_minimum(table, i) for i in shown]) > width:
        priority = max((table.columns[i].priority for i in shown), default=ESSENTIAL)
        if priority == ESSENTIAL:
            # Last resort before the blocks: fold the names as well.
            longest = [_minimum(table, i, tight=True) for i in shown]
            return shown if _needed(shown, longest) <= width else []
        shown = [i for i in shown if table.columns[i].priority != priority]
    return shown


def _needed(shown: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(shown) - 1)


def _cells(table: Table, index: int) -> list[str]:
    texts = (table.columns[index].name, *(row[index] for row in table.rows))
    return [line for text in texts for line in text.split("\n")]


def _natural(table: Table, index: int) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, _cells(table, index)))


def _minimum(table: Table, index: int, *, tight: bool = False) -> int:
    """Return the smallest width of a column; ``tight`` folds all text wherever it can be folded."""
    column, natural = table.columns[index], _natural(table, index)
    if column.numeric or (column.fold is None and not tight):
        return natural
    longest = max(map(_longest_piece, _cells(table, index)))
    return max(longest, min(natural, 0 if tight else column.fold or 0))


def _widths(table: Table, shown: Sequence[int], width: int | None) -> list[int]:
    """Return the width of each shown column: the natural one, or folded text so that the row fits."""
    widths = [_natural(table, i) for i in shown]
    if width is None or _needed(shown, widths) <= width:
        return widths
    least = [_minimum(table, i) for i in shown]
    if _needed(shown, least) > width:
        least = [_minimum(table, i, tight=True) for i in shown]
    excess = _needed(shown, widths) - width
    while excess > 0:
        # Take from the widest column that can still be folded.
        i = max((i for i in range(len(shown)) if widths[i] > least[i]), key=lambda i: widths[i])
        widths[i] -= 1
        excess -= 1
    return widths


def _grid(table: Table, shown: Sequence[int], width: int | None) -> Iterator[Text]:
    """Yield the header and the rows; a folded row has several lines."""
    from rich.text import Text

    widths = _widths(table, shown, width)
    if any(table.columns[i].name for i in shown):
        names = [table.columns[i].name for i in shown]
        yield from _row(table, shown, widths, names, "bold", header=True)
    styles = table.styles or [""] * len(table.rows)
    for row, style in zip(table.rows, styles, strict=True):
        yield from _row(table, shown, widths, [row[i] for i in shown], style)
    if not table.rows:
        yield Text("(no rows)", "dim")


def _row(
    table: Table,
    shown: Sequence[int],
    widths: Sequence[int],
    cells: Sequence[str],
    style: str,
    *,
    header: bool = False,
) -> Iterator[Text]:
    from rich.cells import cell_len
    from rich.text import Text

    folded = [
        [line for part in text.split("\n") for line in fold(part, width)] or [""]
        for text, width in zip(cells, widths, strict=True)
    ]
    for n in range(max(map(len, folded))):
        line = Text(style=style)
        for index, lines, width in zip(shown, folded, widths, strict=True):
            column = table.columns[index]
            content = lines[n] if n < len(lines) else ""
            blanks = " " * (width - cell_len(content))
            aligned = blanks + content if column.numeric else content + blanks
            line.append(aligned, None if header else column.style or None)
            line.append(" " * GAP)
        line.rstrip()
        yield line


def _blocks(table: Table, shown: Sequence[int], width: int | None) -> Iterator[Text]:
    """Yield each row as a block: as many ``name: text`` on a line as fit, further lines indented."""
    from rich.cells import cell_len
    from rich.text import Text

    for row, style in zip(table.rows, table.styles or [""] * len(table.rows), strict=True):
        line = ""
        for index in shown:
            name, text = (" ".join(t.split()) for t in (table.columns[index].name, row[index]))
            if not text:
                continue
            pair = f"{name}: {text}" if name else text
            if line and width is not None and cell_len(line) + GAP + cell_len(pair) > width:
                yield Text(line, style)
                line = "  "
            *lines, line = fold(line + " " * GAP * bool(line.strip()) + pair, width, "  ")
            yield from (Text(full, style) for full in lines)
        yield Text(line, style)


def fold(text: str, width: int | None, indent: str = "") -> list[str]:
    """Return ``text`` in lines of at most ``width`` characters; further lines begin with ``indent``.

    Folds behind blanks, slashes, commas and dashes, and never inside a number or before its unit. Only a
    piece that is longer than a line is cut.

    >>> fold("cuda/03-shared takes 5.2 us", 15)
    ['cuda/03-shared', 'takes 5.2 us']
    """
    from rich.cells import cell_len, chop_cells

    if width is None or cell_len(text) <= width:
        return [text]
    # One character beside the indent at least, or no piece would become shorter.
    width = max(width, len(indent) + 1)
    lines, line = [], ""
    for piece in PIECE.findall(text):
        if cell_len(line) + cell_len(piece.rstrip()) > width:
            lines += [line.rstrip()] if line.strip() else []
            line, piece = indent, piece.lstrip()
        for part in chop_cells(piece, width - len(indent))[:-1]:
            lines.append(line + part)
            line, piece = indent, piece[len(part) :]
        line += piece
    return [*lines, line.rstrip()] if line.strip() else lines


def _longest_piece(text: str) -> int:
    from rich.cells import cell_len

    return max((cell_len(piece.strip()) for piece in PIECE.findall(text)), default=0)
