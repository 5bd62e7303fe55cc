"""Memory of a device: what is free, what the check of a case needs, and the words for too little of it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from weft.core import BACKWARD, FORWARD, Case, Operator
from weft.core.cases import ITEMSIZE

GIB = 1 << 30
FLOAT64_BYTES = 8
# A check has two sets of the candidate's tensors and copies of its outputs, in the case's dtype, and in
# float64 the inputs and the answers.
NARROW_COPIES, WIDE_COPIES = 4, 2
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|MemoryError|out of memory|can't allocate memory|not enough memory|"
    r"more memory than|GiB of memory",
    re.I,
)


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


def check_bytes(operator: Operator, case: Case, direction: str) -> int:
    """Return about how many bytes the check of a case takes, in all processes together."""
    own = sum(i.nbytes for i in case.inputs) + operator.cost(case, FORWARD).written
    own *= 2 if direction == BACKWARD else 1  # a gradient for each input and for the output
    return int(own * (NARROW_COPIES + WIDE_COPIES * FLOAT64_BYTES / ITEMSIZE.get(case.dtype, 4)))


def gpu_shortage(operator: Operator, case: Case, direction: str, device: str) -> str:
    """Return the reason why a check on a GPU ran out of memory; '' if as much as it needs is free now.

    Then nothing else took the memory: the code that was checked did.
    """
    needed = check_bytes(operator, case, direction)
    if not device.startswith("cuda") or (free := free_bytes(device)) >= needed:
        return ""
    return (
        f"out of memory: needed about {needed / GIB:.3g} GiB, {free / GIB:.3g} GiB free; "
        "run with fewer --jobs, or end what else uses the GPU"
    )


class MemoryBudget:
    """Bytes that jobs reserve and give back. ``total`` is what all of them together may have.

    A job that needs more than the total runs alone: it may need less than expected, and otherwise its own
    error names the shortage.
    """

    def __init__(self, total: int = 0) -> None:
        self.total, self.in_use = total, 0
        self._changed = threading.Condition()

    def _fits(self, nbytes: int) -> bool:
        return not self.in_use or self.in_use + nbytes <= self.total

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Wait until ``nbytes`` are free, and have them for as long as the block runs."""
        with self._changed:
            self._changed.wait_for(lambda: self._fits(nbytes))
            self.in_use += nbytes
        try:
            yield
        finally:
            with self._changed:
                self.in_use -= nbytes
                self._changed.notify_all()
