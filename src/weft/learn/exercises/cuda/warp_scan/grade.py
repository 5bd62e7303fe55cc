"""Grade the prefix sums of each 32 elements."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, quarters, require

WRONG = "Do the first lanes add their own value?"
LUCKY = "which its mask names"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, float* y, int n)")
    for n in (128, 256, 32, 1, *odd_sizes(generator, low=33, high=700)):
        x = quarters(generator, 1, 9, n)
        y, check = program.empty("y", n), f"n = {n}"
        counts = program.call("run", program.array("x", x), y, n, case=check)
        expected = np.concatenate([np.cumsum(x[i : i + 32]) for i in range(0, n, 32)])

        def mistake(output: np.ndarray, x: np.ndarray = x) -> str:
            return "Do the first lanes add their own value?" if output[0] == 32 * x[0] != 0 else ""

        yield compare(check, y.read(), expected, mistake=mistake)
        yield require(
            counts.shuffles > 0 and counts.shared_requests == 0,
            f"{check}: shuffles",
            "expected shuffles alone",
        )
        yield require(
            counts.shuffles <= 5 * counts.threads,
            f"{check}: steps",
            f"each lane calls {counts.shuffles / counts.threads:.0f} shuffles, and the distances 1, 2, 4, 8 "
            "and 16 need 5",
        )
