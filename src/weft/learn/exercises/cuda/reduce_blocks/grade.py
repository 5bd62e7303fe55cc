"""Grade the sum of all elements, and the number of atomic additions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, quarters, require

WRONG = "Is the addition atomic?"
LUCKY = "one for each block is enough"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, float* sum, int n)")
    for n in (512, 2048, 1, *odd_sizes(generator, low=600, high=9000)):
        x = quarters(generator, -9, 9, n)
        total, check = program.empty("sum", 1), f"n = {n}"
        counts = program.call(
            "run", program.array("x", x), total, n, case=check, on_race="Is the addition atomic?"
        )
        yield require(
            counts.global_atomics <= counts.blocks,
            f"{check}: atomics",
            f"atomic additions: {counts.global_atomics}, blocks: {counts.blocks}; one for each block is "
            "enough",
        )
        yield compare(check, total.read(), x.sum(keepdims=True))
