"""Grade the sums of 512 elements for each block, the number of blocks, and the sectors of the loads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_checks import require_coalesced
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, quarters, require

WRONG = "outside of x"
LUCKY = "Let neighbouring threads access neighbouring elements"
ELEMENTS = 512  # of a block


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
            (counts.blocks, counts.threads) == (blocks, 256 * blocks),
            f"{check}: launch",
            f"expected {blocks} blocks of 256 threads, got {counts.blocks} with {counts.threads} "
            "threads together",
        )
        yield require_coalesced(check, counts)
