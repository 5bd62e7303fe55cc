"""Find processes by a mark in their environment, to see whether a test left any behind.

Each test uses its own mark, because tests of other workers start the same commands.
"""

from __future__ import annotations

import time
from pathlib import Path

EXIT_SECONDS = 3.0  # a process may take this long to end after SIGKILL


def marked_processes(mark: str) -> list[str]:
    """Return the command lines of living processes that were started with the mark."""
    until = time.monotonic() + EXIT_SECONDS
    while (commands := _alive(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    return commands


def _alive(mark: str) -> list[str]:
    commands = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                line = path.with_name("cmdline").read_bytes()
                commands.append(line.replace(b"\0", b" ").decode(errors="replace").strip())
        except OSError:
            continue  # the process has ended, or belongs to another user
    return commands
