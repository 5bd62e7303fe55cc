"""Description of the CPU, from the operating system's files. Unusual containers leave fields unknown."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from weft.machine.device import Device

# Vector extensions that change a kernel's speed, by the kernel's names for them, narrow to wide.
# fmt: off
VECTORS = (
    "sse4_2", "avx", "f16c", "fma", "avx2",
    "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_int8", "amx_bf16", "amx_fp16",
    "asimd", "asimdhp", "asimddp", "bf16", "sve", "sve2", "sme",
)
# fmt: on
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def parse_size(text: str | None) -> int | None:
    """Return the bytes of a size as /sys writes it (``1024K``); None if it is not one."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text or "")
    return int(match[1]) * UNITS.get(match[2], 1) if match else None


def caches(sys_cpu: Path = Path("/sys/devices/system/cpu")) -> dict[str, int]:
    """Return the bytes of each level's data caches, all instances together: ``{"L1d": ..., "L3": ...}``.

    Cores that share a cache list the same ``shared_cpu_list``, so that each is counted once.
    """
    # One entry for each physical cache: (level, the CPUs that share it).
    seen: dict[tuple[str, str], int] = {}
    for index in sorted(sys_cpu.glob("cpu[0-9]*/cache/index[0-9]*")):
        kind, level = _read(index / "type"), _read(index / "level")
        size = parse_size(_read(index / "size"))
        if level and size and kind in ("Data", "Unified"):
            name = f"L{level}" + ("d" if kind == "Data" else "")
            seen[name, _read(index / "shared_cpu_list") or index.parent.parent.name] = size
    totals: dict[str, int] = {}
    for (name, _), size in sorted(seen.items()):
        totals[name] = totals.get(name, 0) + size
    return totals


def cpuinfo(text: str) -> tuple[str | None, int | None, float | None, frozenset[str]]:
    """Return model, physical cores, MHz and flags from the text of ``/proc/cpuinfo``."""
    model, mhz, flags = None, None, frozenset[str]()
    cores, package = set(), "0"
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name" and model is None:
            model = value
        elif key == "cpu MHz" and re.fullmatch(r"[\d.]+", value):
            mhz = max(mhz or 0.0, float(value))
        # "Features" is the key on Arm.
        elif key in ("flags", "Features") and not flags:
            flags = frozenset(value.split())
        elif key == "physical id":
            package = value
        # Hyper-threads of a core repeat its id; ids repeat between packages.
        elif key == "core id":
            cores.add((package, value))
    return model, len(cores) or None, mhz, flags


def usable_threads() -> int:
    """Return how many threads may run at once, by affinity mask and container quota."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    # cgroup v2: "quota period" in microseconds, or "max period" without a limit.
    quota = (_read(Path("/sys/fs/cgroup/cpu.max")) or "max").split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        count = min(count, max(1, round(int(quota[0]) / int(quota[1]))))
    return count


def memory_bytes() -> int | None:
    """Return the bytes of main memory, or a container's limit if that is lower."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    limit = _read(Path("/sys/fs/cgroup/memory.max")) or "max"
    return min(total, int(limit)) if limit.isdigit() else total


def _sysctl(name: str) -> str | None:
    """Return a value from macOS, or None."""
    try:
        # macOS has no /proc: sysctl has the same figures.
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def describe() -> Device:
    """Describe this machine's CPU. A missing file raises nothing."""
    text = _read(Path("/proc/cpuinfo")) or ""
    model, cores, mhz, flags = cpuinfo(text)
    sizes = caches()
    if sys.platform == "darwin":
        model = _sysctl("machdep.cpu.brand_string")
        physical = _sysctl("hw.physicalcpu")
        cores = int(physical) if physical and physical.isdigit() else None
        l2 = parse_size(_sysctl("hw.l2cachesize"))
        sizes = {"L2": l2} if l2 else {}
    highest = _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"))
    data = {name: size for name, size in sizes.items() if size}
    return Device(
        kind="cpu",
        name=model or platform.processor() or platform.machine() or "unknown",
        arch=platform.machine() or "unknown",
        units=cores,
        threads=usable_threads(),
        clock_mhz=mhz,
        clock_max_mhz=int(highest) / 1000 if highest and highest.isdigit() else None,
        memory_bytes=memory_bytes(),
        l2_bytes=data[max(data)] if data else None,  # the highest level: names sort by level
        caches=data,
        vectors=tuple(v for v in VECTORS if v in flags),
    )
