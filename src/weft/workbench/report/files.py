"""Finding records: files, and folders of files, with torn lines counted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from weft.core.errors import WeftError
from weft.core.record import Record, read


def load(paths: Iterable[Path]) -> tuple[list[Record], int]:
    """All records of the files named, and of every ``.jsonl`` below the folders named.

    Returns them in the order of the paths with the number of torn lines passed over; raises
    :class:`WeftError` where a path is missing, holds no record, or holds something else.
    """
    records: list[Record] = []
    torn = 0
    for path in paths:
        files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise WeftError(
                "no records in folder",
                expected="at least one .jsonl file",
                got=path,
                hint="write one: weft bench --save FILE",
            )
        for file in files:
            found, missed = _read(file)
            records += found
            torn += missed
    return records, torn


def _read(file: Path) -> tuple[list[Record], int]:
    try:
        return read(file)
    except (UnicodeDecodeError, OSError) as error:
        raise WeftError(
            f"{file} could not be read as records",
            expected="a text file of JSON lines",
            got=f"{type(error).__name__}: {error}",
        ) from error
