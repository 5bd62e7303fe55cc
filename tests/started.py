"""Which processes were started with a mark in their environment: what a test may have left behind.

A mark of the test's own, since another worker's tests start the same commands.
"""

from __future__ import annotations

import time
from pathlib import Path

DYING = 3.0  # seconds that a process which was sent SIGKILL may take to be gone


def started(mark: str) -> list[str]:
    """The command lines of processes that live on, in whose environment the mark stood at their
    start."""
    until = time.monotonic() + DYING
    while (found := _alive(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _alive(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                line = path.with_name("cmdline").read_bytes()
                found.append(line.replace(b"\0", b" ").decode(errors="replace").strip())
        except OSError:
            continue  # it has ended, or is another user's
    return found
