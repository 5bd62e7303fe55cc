"""Grade the sums, the bank conflicts and the active lanes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_checks import require_active, require_conflict_free
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, quarters, require

WRONG = "lanes access different words of one bank"
LUCKY = "lanes of one warp go different paths"
SHARE = 0.95  # of active lanes
ELEMENTS = 256  # of a block


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, float* sums, int n)")
    for n in (1024, 2048, 1, 255, 513, *odd_sizes(generator, low=600, high=5000, count=2)):
        x = quarters(generator, -9, 9, n)
        blocks = -(-n // ELEMENTS)
        sums, check = program.empty("sums", blocks), f"n = {n}"
        counts = program.call("run", program.array("x", x), sums, n, case=check)
        padded = np.zeros(blocks * ELEMENTS, np.float32)
        padded[:n] = x
        yield compare(check, sums.read(), padded.reshape(blocks, ELEMENTS).sum(axis=1))
        yield require(
            counts.barriers >= 8 * blocks, f"{check}: steps", "a tree over 256 elements has 8 steps"
        )
        yield require_conflict_free(check, counts)
        yield require_active(check, counts, share=SHARE)
