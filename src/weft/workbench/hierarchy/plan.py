"""Which sizes to measure at: geometric, wide apart, and close about an expected break."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from weft.machine import Device
from weft.machine.cpu import parse_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
COARSE, FINE = 2, 8  # sizes a doubling, far from an expected break and near it
NEAR = 0.75  # doublings on either side that are near

# KiB of an SM's L1 cache and shared memory together by compute capability, which no driver tells:
# CUDA C++ Programming Guide, "Compute Capabilities", the rows on unified data cache.
UNIFIED_KIB = {
    "sm_75": 96,
    "sm_80": 192,
    "sm_86": 128,
    "sm_87": 192,
    "sm_89": 128,
    "sm_90": 256,
    "sm_100": 256,
    "sm_103": 256,
    "sm_120": 128,
}


def sizes(least: int, most: int, expected: Iterable[int], unit: int) -> list[int]:
    """Sizes in bytes from ``least`` to ``most``, multiples of ``unit``, rising.

    ``COARSE`` of them a doubling, and ``FINE`` within ``NEAR`` doublings of an expected break.
    """
    exact = {round(least * 2 ** (k / COARSE)) for k in range(200)}
    for size in expected:
        steps = range(-round(NEAR * FINE), round(NEAR * FINE) + 1)
        exact |= {round(size * 2 ** (k / FINE)) for k in steps}
    rounded = {max(unit, round(s / unit) * unit) for s in exact if s <= most}
    return sorted(s for s in rounded | {most // unit * unit} if least <= s <= most)


def known_sizes(device: Device) -> dict[str, int]:
    """Bytes of each level that one core, or one SM, can fill, by the level's name; what is not
    known is left out.

    Of a GPU: ``L1`` (with no shared memory taken from it), ``shared`` and ``L2``. Of a CPU: one
    core's instance of each cache.
    """
    if device.kind == "cpu":
        return per_core(device.caches)
    found = {
        "L1": UNIFIED_KIB.get(device.arch, 0) * KIB,
        "shared": device.shared_per_sm or 0,
        "L2": device.l2_bytes or 0,
    }
    return {level: size for level, size in found.items() if size}


def per_core(
    caches: Mapping[str, int], sys_cpu: Path = Path("/sys/devices/system/cpu")
) -> dict[str, int]:
    """One instance of each data cache in ``caches`` (which holds all instances together), as the
    first core that we may run on has it; a level that /sys does not tell is left out."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    found: dict[str, int] = {}
    for index in sorted((sys_cpu / f"cpu{min(allowed)}" / "cache").glob("index[0-9]*")):
        kind, level, size = (_text(index / word) for word in ("type", "level", "size"))
        name = f"L{level}" + ("d" if kind == "Data" else "")
        if name in caches and kind != "Instruction" and (nbytes := parse_size(size)):
            found[name] = nbytes
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
