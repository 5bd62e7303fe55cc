"""Memory of a judgement: the problem's own bytes, what is free, and the words for too little of it."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

GIB = 1 << 30
# Peak of a judgement as a multiple of the problem's own inputs, outputs and weights, by design and
# as measured; docs/bring/suites.md has what it consists of.
PEAK_FACTOR = 4
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|MemoryError|out of memory|can't allocate memory|not enough memory|"
    r"more memory than|GiB of memory",
    re.I,
)


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Memory that ran out: ``where`` (reference, judge or candidate), needed and free bytes.

    ``message`` is what the process said that ran out.
    """

    where: str
    needed: int
    free: int
    message: str = ""

    @property
    def reason(self) -> str:
        detail = f"; {self.message}" if self.message else ""
        needed, free = self.needed / GIB, self.free / GIB
        return f"out of memory: needed about {needed:.3g} GiB, {free:.3g} GiB free ({self.where}{detail})"


def is_shortage(error: BaseException | str) -> bool:
    """Return True for an error, or an error's message, that says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return bool(_OUT_OF_MEMORY.search(text))


def available_host_bytes() -> int:
    """Return the bytes of host memory that new work can have, also below a container's limit."""
    # More than any machine has: where nothing can be read, nothing is refused.
    available = 1 << 62
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) << 10
    with suppress(OSError, ValueError):  # the limit of a container: control groups, version 2
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            cache = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.M)
            # The kernel drops inactive file pages before it refuses memory.
            used -= int(cache[1]) if cache else 0
            available = min(available, max(int(limit) - used, 0))
    return available


def free_bytes(device: str) -> int:
    """Return the bytes that this process can still allocate on a device."""
    if device == "cpu":
        return available_host_bytes()
    # PyTorch's cache is in use for the driver, but free for this process.
    free, _ = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
