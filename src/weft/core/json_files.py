"""Read JSON that somebody else may have written: a bad file is a ``ValueError``, never a crash or a hang.

``json.loads`` raises RecursionError for deep nesting and accepts integers of any length, which later
overflow a float. Reading a FIFO waits for ever, and an endless device fills the memory.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError

MAX_BYTES = 256 << 20  # the largest file that Weft writes as JSON is a profiler's trace, tens of megabytes
MAX_INTEGER = 1 << 64  # every count, seed and address fits


def loads(text: str | bytes) -> Any:
    """Parse JSON text.

    Raises ValueError, and nothing else, for text that is no JSON, is no UTF-8, nests too deeply or holds an
    integer beyond 64 bits.
    """
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("the JSON nests too deeply") from error


def read_text(path: Path, *, limit: int = MAX_BYTES, errors: str = "strict") -> str:
    """Return a UTF-8 file's text.

    Raises OSError if it cannot be read; ValueError if it is no regular file, has over ``limit`` bytes or is
    no UTF-8, unless ``errors`` is "replace".
    """
    if (size := regular_size(path)) > limit:
        raise ValueError(f"{path} has {size} bytes; at most {limit} are read")
    return path.read_text(encoding="utf-8", errors=errors)


def regular_size(path: Path) -> int:
    """Return the bytes of a regular file; raise ValueError for a folder, FIFO or device, or OSError.

    It is called before a file is opened: to open a FIFO waits for a writer.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is no regular file")
    return status.st_size


def read_json(path: Path, *, limit: int = MAX_BYTES) -> Any:
    """Return a JSON file's content; raises as :func:`read_text` and :func:`loads` do."""
    return loads(read_text(path, limit=limit))


@contextmanager
def content_errors(path: Path, expected: str) -> Iterator[None]:
    """Turn what a file's content of another form raises where it is used into one :class:`WeftError`.

    It is for files with too many fields to check each: a study's or a demonstration's results.
    """
    try:
        yield
    except WeftError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        got = f"{type(error).__name__}: {error}"
        raise WeftError(f"{path} has other content", expected=expected, got=got) from error


def _integer(digits: str) -> int:
    # By length first: to convert 4000 digits takes a while, and more of them raise.
    if len(digits) > 24 or abs(value := int(digits)) >= MAX_INTEGER:
        raise ValueError(f"the integer {digits[:24]}... is beyond 64 bits")
    return value
