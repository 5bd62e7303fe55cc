"""Grade waves, loss and the choice of a tile by placing blocks one by one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require
from weft.learn.probes.returned import function_returning

WRONG = "the last wave is full"
LUCKY = "blocks at once"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    waves, loss = (function_returning("a number", candidate, name) for name in ("waves", "loss"))
    best = function_returning("a pair of numbers", candidate, "best")
    points = [(264, 132, 1), (1, 132, 2), (264, 132, 2), (265, 132, 2), (7, 3, 1)]
    points += [(int(b), int(s), int(r)) for b, s, r in generator.integers((1, 2, 2), (3000, 200, 9), (8, 3))]
    for blocks, sms, resident in points:
        count, unused = _launched_waves(blocks, sms, resident)
        check, actual = f"waves({blocks}, {sms}, {resident})", waves(blocks, sms, resident)
        reason = f"expected {count}, got {actual}. {sms} SMs run {sms * resident} blocks at once"
        if unused == 0 and actual == count + 1:
            reason += ", and the last wave is full"
        require(actual == count, check, reason)
        share, got = unused / (count * sms * resident), loss(blocks, sms, resident)
        yield require(abs(got - share) < 1e-12, check, f"loss: expected {share:.6f}, got {got:.6f}")
    choices = [
        [(int(b), int(w)) for b, w in generator.integers(1, (2000, 10), size=(5, 2))] for _ in range(4)
    ]
    for tiles in ([(1000, 3), (200, 9)], [(900, 2), (1, 11)], [(200, 4), (100, 4)], *choices):
        times = [_launched_waves(blocks, 100, 2)[0] * work for blocks, work in tiles]
        expected, actual = tiles[times.index(min(times))], best(list(tiles), 100, 2)
        reason = f"expected {expected}, got {actual}; the times are {times}"
        yield require(actual == expected, f"best({tiles}, 100, 2)", reason)


def _launched_waves(blocks: int, sms: int, resident: int) -> tuple[int, int]:
    """Start waves until all blocks have run; return the waves and the places left in the last one."""
    count = 0
    while blocks > 0:
        blocks -= sms * resident
        count += 1
    return count, -blocks
