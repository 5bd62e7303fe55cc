"""Grade resident blocks and occupancy where each of the four resources is the limit, and at random points."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require
from weft.learn.probes.returned import function_returning

WRONG = "given out to whole warps"
LUCKY = "at most 32 blocks"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    resident_blocks = function_returning("a number", candidate, "resident_blocks")
    occupancy = function_returning("a number", candidate, "occupancy")
    cases = [(256, 40, 0), (1024, 32, 0), (256, 16, 100_000), (192, 255, 0), (100, 33, 5000)]
    # Threads, blocks and, with no byte to spare, shared memory as the limit.
    cases += [(256, 16, 0), (1024, 8, 0), (32, 16, 0), (64, 8, 0), (64, 16, 57_344)]
    for _ in range(30):
        threads, registers = int(generator.integers(1, 1025)), int(generator.integers(1, 256))
        cases.append((threads, registers, int(generator.integers(0, 50_000))))
    for threads, registers, shared in cases:
        check = f"resident_blocks({threads}, {registers}, {shared})"
        expected, actual = _fill(threads, registers, shared), resident_blocks(threads, registers, shared)
        reason = f"expected {expected}, got {actual}"
        if actual > expected == 32:
            reason += ". An SM holds at most 32 blocks"
        elif actual != expected and expected < 233472 // (shared + 1024):
            reason += ". Registers are given out to whole warps, 256 at a time"
        require(actual == expected, check, reason)
        share = expected * (threads + 31 - (threads + 31) % 32) / 2048
        got = occupancy(threads, registers, shared)
        yield require(abs(got - share) < 1e-12, check, f"occupancy: expected {share}, got {got}")


def _fill(threads: int, registers: int, shared: int) -> int:
    """Place blocks on an empty SM, one after the other, until one does not fit."""
    warps = [min(32, threads - start) for start in range(0, threads, 32)]
    allocation = next(size for size in range(0, 65537, 256) if size >= registers * 32)
    # Registers come in pools of whole warps: as many as fit.
    free = {"warps": 64, "register pools": 65536 // allocation, "bytes": 233472, "blocks": 32}
    block = {"warps": len(warps), "register pools": len(warps), "bytes": shared + 1024, "blocks": 1}
    count = 0
    while all(free[name] >= block[name] for name in free):
        free = {name: free[name] - block[name] for name in free}
        count += 1
    return count
