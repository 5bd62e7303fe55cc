"""Reader of Matrix Market files: sparse matrices as text, one entry a line.

The format: R. Boisvert, R. Pozo and K. Remington, "The Matrix Market exchange formats: initial design",
NISTIR 5935 (1996). It takes a second for about a million entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.core import WeftError
from weft.ops.sparse.csr import from_coo
from weft.ops.sparse.spec import MAX_INT32

FIELDS, SYMMETRIES = ("real", "integer", "pattern"), ("general", "symmetric")
HEADER = "%%MatrixMarket matrix coordinate real|integer|pattern general|symmetric"


@dataclass(frozen=True)
class SparseMatrix:
    """A matrix in CSR: ``values``, ``columns`` (int32) and ``offsets`` (int64), and its shape."""

    values: Tensor
    columns: Tensor
    offsets: Tensor
    shape: tuple[int, int]


def read(path: str | Path, dtype: torch.dtype = torch.float32) -> SparseMatrix:
    """Read a matrix in coordinate format, with values in ``dtype``, on the CPU.

    Entries of a ``pattern`` are 1. Of a ``symmetric`` matrix the file has the lower triangle, and the result
    has both. Entries of one place are kept, and a product adds them up. Raises :class:`WeftError` with the
    number of the line for a file that is not of this format, and for one of complex, skew-symmetric,
    Hermitian or dense (``array``) matrices.
    """
    path = Path(path)
    try:
        with path.open(encoding="ascii") as file:
            return _read(enumerate(file, 1), str(path), dtype)
    except OSError as error:
        raise WeftError(f"Matrix Market file {path}", got=error.strerror or repr(error)) from error
    except UnicodeDecodeError as error:
        raise WeftError(f"Matrix Market file {path}", expected="ASCII text", got=str(error)) from error


def _read(lines: Iterator[tuple[int, str]], path: str, dtype: torch.dtype) -> SparseMatrix:
    def wrong(number: int, expected: str, got: object) -> WeftError:
        return WeftError(f"Matrix Market file {path}, line {number}", expected=expected, got=f"{got!r:.80}")

    _, first = next(lines, (1, ""))
    words = first.lower().split()
    right = len(words) == 5 and first.startswith("%%MatrixMarket") and words[1:3] == ["matrix", "coordinate"]
    if not (right and words[3] in FIELDS and words[4] in SYMMETRIES):
        raise wrong(1, HEADER, first.strip())
    field, symmetric = words[3], words[4] == "symmetric"
    # Comments and blank lines may stand anywhere after the header.
    texts = ((n, text) for n, text in lines if text.strip() and not text.startswith("%"))
    number, text = next(texts, (2, ""))
    sizes = text.split()
    if len(sizes) != 3 or not all(s.isdecimal() for s in sizes):
        raise wrong(number, "rows, columns and number of entries", text.strip())
    num_rows, num_columns, count = map(int, sizes)
    if num_columns > MAX_INT32:
        raise wrong(number, f"at most {MAX_INT32} columns", num_columns)
    if symmetric and num_rows != num_columns:
        raise wrong(number, "as many rows as columns of a symmetric matrix", text.strip())
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    expected = "row, column" if field == "pattern" else "row, column, value"
    for number, text in texts:
        words = text.split()
        if len(words) != 2 + (field != "pattern") or "_" in text:
            raise wrong(number, expected, text.strip())
        try:
            row, column = int(words[0]), int(words[1])
            value = 1.0 if field == "pattern" else float(words[2] if field == "real" else int(words[2]))
        except (ValueError, OverflowError):
            raise wrong(number, expected, text.strip()) from None
        if not (1 <= row <= num_rows and 1 <= column <= num_columns):
            raise wrong(number, f"a place in {num_rows} rows and {num_columns} columns", text.strip())
        if symmetric and column > row:
            raise wrong(number, "entries on and below the diagonal of a symmetric matrix", text.strip())
        if math.isfinite(value) and abs(value) > torch.finfo(dtype).max:
            raise wrong(number, f"a value within {dtype}", text.strip())
        if len(rows) == count:
            raise wrong(number, f"{count} entries, as announced", "more")
        rows.append(row - 1)
        columns.append(column - 1)
        values.append(value)
    if len(rows) != count:
        raise wrong(number, f"{count} entries, as announced", len(rows))
    return _matrix(rows, columns, values, (num_rows, num_columns), symmetric, dtype)


def _matrix(
    rows: list[int],
    columns: list[int],
    values: list[float],
    shape: tuple[int, int],
    symmetric: bool,
    dtype: torch.dtype,
) -> SparseMatrix:
    down, across = torch.tensor(rows, dtype=torch.int64), torch.tensor(columns, dtype=torch.int64)
    entries = torch.tensor(values, dtype=torch.float64).to(dtype)
    if symmetric:
        mirrored = down != across
        down, across = torch.cat((down, across[mirrored])), torch.cat((across, down[mirrored]))
        entries = torch.cat((entries, entries[mirrored]))
    return SparseMatrix(*from_coo(down, across, entries, shape[0]), shape)
