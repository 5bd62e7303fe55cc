"""Simulation of a CPU's first two caches: set-associative, least recently used, fed with addresses.

The model is simple on purpose. One core; each level has sets of a few lines (its associativity) and evicts
the line of a set that was used longest ago; a store brings its line in like a load (write-allocate); what
misses in L1 goes on to L2. Addresses are virtual, and there is no prefetcher, no TLB and no other program. So
the counts are those of the loop nest, not of the machine: a prefetcher hides the time of a miss, and the line
still moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.machine.cpu import parse_size

SYS_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
EMPTY = -1  # tag of a position that has no line yet
Lines = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class CacheLevel:
    """Geometry of one level, in bytes. ``source``: ``system`` as the system describes it, or ``default``."""

    name: str
    size: int
    associativity: int
    line: int
    source: str = "system"

    @property
    def sets(self) -> int:
        return self.size // (self.associativity * self.line)


# For a system that describes no caches, such as macOS: sizes of a common x86 core.
DEFAULTS = (
    CacheLevel(name="L1", size=32 << 10, associativity=8, line=64, source="default"),
    CacheLevel(name="L2", size=1 << 20, associativity=16, line=64, source="default"),
)


def cache_levels(folder: Path = SYS_CACHE) -> tuple[CacheLevel, CacheLevel]:
    """Return L1 (data) and L2 of the first core by Linux's files; ``DEFAULTS`` if one of them is unknown."""
    by_name: dict[str, CacheLevel] = {}
    for index in sorted(folder.glob("index[0-9]*")):
        if _text(index / "type") not in ("Data", "Unified"):
            continue
        size, numbers = parse_size(_text(index / "size")), []
        for field in ("ways_of_associativity", "coherency_line_size"):
            numbers.append(int(text) if (text := _text(index / field)).isdigit() else 0)
        associativity, line = numbers
        if size and associativity and line and size % (associativity * line) == 0:
            name = f"L{_text(index / 'level')}"
            by_name[name] = CacheLevel(name=name, size=size, associativity=associativity, line=line)
    if "L1" in by_name and "L2" in by_name and by_name["L1"].line == by_name["L2"].line:
        return by_name["L1"], by_name["L2"]
    return DEFAULTS


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def missed_lines(lines: Lines, tags: Lines, missed: Lines) -> int:
    """Look up ``lines`` in order in one level; return how many missed, and write those to ``missed``.

    ``tags`` (sets, associativity) is the level's state, in each set the line that was used last in front. It
    changes in place, so that a stream can come in pieces. ``missed`` has room for all lines.
    """
    sets, associativity = tags.shape
    count = 0
    for line in lines:
        row = tags[line % sets]
        position = 0
        while position < associativity - 1 and row[position] != line:
            position += 1
        if row[position] != line:  # the last position: either the line or the one to evict
            missed[count] = line
            count += 1
        while position > 0:
            row[position] = row[position - 1]
            position -= 1
        row[0] = line
    return count


@cache
def _look_up() -> Callable[[Lines, Lines, Lines], int]:
    """Compile :func:`missed_lines`, which takes a thousand times as long in Python."""
    from weft.backends.numba_jit import numba

    compiled: Any = numba.njit("int64(int64[::1], int64[:, ::1], int64[::1])")(missed_lines)
    return lambda lines, tags, missed: int(compiled(lines, tags, missed))


@dataclass(frozen=True)
class Misses:
    """Accesses of a stream, and how many of them missed in L1 and then in L2."""

    accesses: int
    l1: int
    l2: int


def simulate(addresses: Iterable[Lines], levels: tuple[CacheLevel, CacheLevel]) -> Misses:
    """Send addresses in bytes, which come in pieces, through empty caches; return the misses."""
    look_up = _look_up()
    tags = [np.full((level.sets, level.associativity), EMPTY, dtype=np.int64) for level in levels]
    accesses, l1, l2 = 0, 0, 0
    for piece in addresses:
        lines = np.floor_divide(piece, levels[0].line)
        missed = np.empty_like(lines)
        first = look_up(lines, tags[0], missed)
        second = look_up(missed[:first], tags[1], np.empty(first, dtype=np.int64))
        accesses, l1, l2 = accesses + lines.size, l1 + first, l2 + second
    return Misses(accesses, l1, l2)
