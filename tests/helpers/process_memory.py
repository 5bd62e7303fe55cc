"""Peak of the memory of a process and its descendants, sampled while it runs."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PROPORTIONAL = re.compile(r"^Pss_(?:Anon|Shmem): +(\d+) kB", re.M)
INTERVAL_SECONDS = 0.01
# Reading takes the lock of the process's address space, which its own allocations then wait for: with CUDA's
# libraries mapped a reading takes tens of milliseconds. At most a tenth of the time is spent reading.
PAUSE_FACTOR = 9.0


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    members = [pid]
    for member in members:
        with suppress(OSError):
            for task in Path(f"/proc/{member}/task").glob("*/children"):
                members += map(int, task.read_text().split())
    return members


def memory_bytes(pids: Sequence[int]) -> int:
    """Return the anonymous and shared memory of processes together; mapped files do not count.

    A page that several processes share is counted once, in equal parts: a fork copies nothing.
    """
    total = 0
    for pid in pids:
        with suppress(OSError):
            fields = PROPORTIONAL.findall(Path(f"/proc/{pid}/smaps_rollup").read_text())
            total += sum(map(int, fields)) << 10
    return total


def run(command: Sequence[str], timeout: float) -> tuple[int, str, str, float, int]:
    """Run a command; return its code, stdout, stderr, seconds and the peak of its tree's memory."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak, members = 0, [process.pid]

    def watch() -> None:
        nonlocal peak, members
        ticks = 0
        while process.poll() is None:
            if ticks % 20 == 0:
                members = tree(process.pid)
            ticks += 1
            start = time.monotonic()
            peak = max(peak, memory_bytes(members))
            time.sleep(max(INTERVAL_SECONDS, PAUSE_FACTOR * (time.monotonic() - start)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        out, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
    watcher.join()
    return process.returncode, out, errors, time.monotonic() - began, peak
