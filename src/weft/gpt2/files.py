"""Writing what must survive: whole or not at all, and on the disk before it is said to be."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.core import WeftError

FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}
FULL[errno.EFBIG] = "a file may not grow so large here"


class Unwritten(WeftError):
    """What was to be kept could not be; what was kept before still is."""


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Turn a failed write into one :class:`Unwritten` that says what was not written, and why."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        hint = "nothing older is lost: make room, then weft train --resume"
        if number not in FULL:
            hint = "see that the folder can be written, then weft train --resume"
        reason = FULL.get(number) or error.strerror or str(error)
        raise Unwritten(f"{what} cannot be written to {path}", got=reason, hint=hint) from error


def sync(path: Path) -> None:
    """Have the system put a file, or a folder's list of names, onto the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def replace(path: Path, text: str) -> None:
    """Write a text file anew, so that at any moment it is the old one or the new one, whole."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        sync(beside)
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)
