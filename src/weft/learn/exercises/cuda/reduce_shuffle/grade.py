"""Grade the sums, the shuffles, and one barrier for each block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, quarters, require

WRONG = "which its mask names"
LUCKY = "expected one barrier"
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
        yield require(counts.shuffles > 0, f"{check}: shuffles", "no lane reads another lane's register")
        yield require(
            counts.barriers <= blocks,
            f"{check}: barriers",
            f"expected one barrier for each block, got {counts.barriers / blocks:.0f}",
        )
