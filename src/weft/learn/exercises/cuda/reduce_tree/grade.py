"""Grade the sums of all blocks, and that a tree computes them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, quarters, require

WRONG = "Is there a barrier between two steps?"
LUCKY = "of s, which nothing has written"
ELEMENTS = 256  # of a block


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, float* sums, int n)")
    for n in (1024, 2048, 1, 255, 513, *odd_sizes(generator, low=600, high=5000, count=2)):
        x = quarters(generator, -9, 9, n)
        blocks = -(-n // ELEMENTS)
        sums, check = program.empty("sums", blocks), f"n = {n}"
        counts = program.call(
            "run", program.array("x", x), sums, n, case=check, on_race="Is there a barrier between two steps?"
        )
        padded = np.zeros(blocks * ELEMENTS, np.float32)
        padded[:n] = x
        yield compare(check, sums.read(), padded.reshape(blocks, ELEMENTS).sum(axis=1))
        yield require(
            counts.barriers >= 8 * blocks,
            f"{check}: steps",
            "a tree over 256 elements has 8 steps with a barrier each; barriers of a block here: "
            f"{counts.barriers // blocks}. Does one thread add everything?",
        )
