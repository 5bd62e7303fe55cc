"""Tests side by side, and those that measure time with nobody beside them (marker ``alone``).

Workers share two lock files. A test holds ``room`` together with the others, an ``alone`` one by
itself. Whoever comes passes the ``gate`` first, which one that waits to be alone keeps shut: else
the others, who come and go, would never leave it the room.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def _held(path: Path, how: int) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, how)
        yield  # closing the file lets go


@contextmanager
def place(alone: bool, folder: Path | None = None) -> Iterator[None]:
    """A place to run a test in, among pytest-xdist's workers; no lock where there is one worker."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if folder is None and run is None:
        yield
        return
    stem = (folder or Path(tempfile.gettempdir())) / f"weft-tests-{run}"
    gate, room = stem.with_suffix(".gate"), stem.with_suffix(".room")
    how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with ExitStack() as kept:
        with _held(gate, how):
            kept.enter_context(_held(room, how))
        yield
