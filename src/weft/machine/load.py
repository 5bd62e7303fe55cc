"""Load of this machine by other processes, which makes times and measured ceilings doubtful.

The CPU's share comes from ``/proc/stat`` over a short window, without this process's own time. Without that
file it is judged by the load average. The GPU's share comes from NVML, before this process uses the GPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.machine import nvml

WINDOW = 0.15  # seconds; /proc/stat counts in steps of 10 ms on each core
STAT = Path("/proc/stat")
# A parallel kernel waits for its slowest thread: one core of many that others use slows it down.
CPU_LIMIT = 0.05  # share of the cores, and at least MIN_CORES of one
MIN_CORES = 0.25
# Without /proc/stat. The load average lags by a minute and counts this process as well.
AVERAGE_LIMIT = 0.75
# A GPU's kernels need one core of the host to launch them.
SPARE_CORES = 1.0
GPU_LIMIT = 0.05
IDLE_COLUMNS = (3, 4)  # of a line of /proc/stat: idle and waiting for a disk
COLUMNS = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user


@dataclass(frozen=True, kw_only=True)
class Load:
    """Use of the machine by others. ``None`` means unknown.

    ``others`` is the mean number of cores that other processes use, of ``cores`` that this process may use.
    ``average`` is the load average over a minute. ``gpu`` is the share of time in which others' kernels ran.
    """

    kind: str
    cores: int
    others: float | None = None
    average: float | None = None
    gpu: float | None = None

    @property
    def busy(self) -> str:
        """Reason why times are doubtful; empty if the machine is quiet.

        >>> Load(kind="cpu", cores=2, others=1.9, average=7.1).busy
        'load 7.1 on 2 cores, of which other processes use 1.9'
        >>> Load(kind="cpu", cores=2, others=0.1, average=7.1).busy
        ''
        """
        reasons = []
        if self._cpu_is_busy():
            average = "" if self.average is None else f"load {self.average:.1f} on {self.cores} cores"
            used = "" if self.others is None else f"other processes use {self.others:.1f}"
            reasons.append(", of which ".join(filter(None, (average, used))))
        if self.gpu is not None and self.gpu > GPU_LIMIT:
            reasons.append(f"other processes use the GPU {self.gpu:.0%} of the time")
        return "; ".join(reasons)

    def _cpu_is_busy(self) -> bool:
        if self.others is None:
            return self.average is not None and self.average > AVERAGE_LIMIT * self.cores
        if self.kind == "cuda":
            return self.cores - self.others < SPARE_CORES
        return self.others > max(MIN_CORES, CPU_LIMIT * self.cores)

    def to_json(self) -> dict[str, Any]:
        """Return the load for a record, with ``busy``."""
        rounded = {"others": self.others, "average": self.average, "gpu": self.gpu}
        numbers = {k: None if v is None else round(v, 2) for k, v in rounded.items()}
        return {"cores": self.cores, **numbers, "busy": self.busy}


def usable_cpus() -> frozenset[int]:
    """Return the numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def busy_seconds(text: str, cpus: Collection[int], ticks_per_second: int = 100) -> float | None:
    """Return the seconds that these CPUs have worked since the start, from the text of ``/proc/stat``.

    None means that the text has no such CPU.
    """
    total, known = 0, False
    for line in text.splitlines():
        name, *fields = line.split()[: COLUMNS + 1] or [""]
        if not (name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus):
            continue
        total += sum(int(f) for i, f in enumerate(fields) if i not in IDLE_COLUMNS)
        known = True
    return total / ticks_per_second if known else None


def _busy_now(cpus: Collection[int]) -> float | None:
    try:
        return busy_seconds(STAT.read_text(), cpus, os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError):
        return None


def measure(kind: str, window: float = WINDOW) -> Load:
    """Return the machine's load by other processes over ``window`` seconds, in which this thread sleeps.

    ``kind`` is "cuda" or "cpu". A file or a library that is missing leaves its field None.
    """
    cpus = usable_cpus()
    start, busy, own = time.perf_counter(), _busy_now(cpus), time.process_time()
    others = None
    if busy is not None:
        time.sleep(window)
        after = _busy_now(cpus)
        elapsed = time.perf_counter() - start
        used = (after or busy) - busy - (time.process_time() - own)
        others = min(float(len(cpus)), max(0.0, used / elapsed))
    try:
        average = os.getloadavg()[0]
    except (AttributeError, OSError):
        average = None
    gpu = _gpu_share() if kind == "cuda" else None
    return Load(kind=kind, cores=len(cpus), others=others, average=average, gpu=gpu)


def _gpu_share() -> float | None:
    """Return the share of the last second in which kernels ran; None once this process uses the GPU."""
    torch = sys.modules.get("torch")
    # NVML cannot tell this process's kernels from others' where process ids are hidden, as in a container.
    if torch is not None and torch.cuda.is_initialized():
        return None
    library, handle = nvml.library(), nvml.handle()
    if library is None or handle is None:
        return None
    rates = nvml.ask(library.nvmlDeviceGetUtilizationRates, handle)
    return None if rates is None else float(rates.gpu) / 100


def busier(one: Load, other: Load) -> Load:
    """Return the load with the larger use by others; a busy one before a quiet one."""

    def rank(load: Load) -> tuple[bool, float]:
        return bool(load.busy), (load.others or 0.0) + (load.gpu or 0.0)

    return max(one, other, key=rank)
