"""Durable writes: a file is complete or absent, and on the disk before anything relies on it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.core import WeftError
from weft.core.output_files import sync

DISK_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "a file may not grow so large here",
}


class WriteError(WeftError):
    """A file could not be written; files that were complete before are unchanged."""


@contextmanager
def write_errors(name: str, path: Path) -> Iterator[None]:
    """Turn an OSError into one :class:`WriteError` that says what could not be written, and why."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        hint = "nothing older is lost: free some space, then weft train --resume"
        if number not in DISK_FULL:
            hint = "make the folder writable, then weft train --resume"
        reason = DISK_FULL.get(number) or error.strerror or str(error)
        raise WriteError(f"{name} cannot be written to {path}", got=reason, hint=hint) from error


def replace_text(path: Path, text: str) -> None:
    """Replace a text file, so that at any moment it is the old one or the new one, complete."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)  # the rename itself is durable only when the folder is
