"""Grade the exclusive prefix sums of each 256 elements, and the work."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, quarters, require

WRONG = "Is the root 0 before the downward sweep?"
LUCKY = "does every thread work in every step?"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, float* y, int n)")
    for n in (256, 512, 1, *odd_sizes(generator, low=257, high=1500)):
        x = quarters(generator, 1, 9, n)
        y, check = program.empty("y", n), f"n = {n}"
        counts = program.call("run", program.array("x", x), y, n, case=check)
        expected = np.concatenate([np.cumsum(x[i : i + 256]) - x[i : i + 256] for i in range(0, n, 256)])

        def mistake(output: np.ndarray, expected: np.ndarray = expected, x: np.ndarray = x) -> str:
            if output[0] == x[0]:
                return "The sums are exclusive: the first one is 0"
            return "Is the root 0 before the downward sweep?" if output[0] == x[:256].sum() else ""

        yield compare(check, y.read(), expected, mistake=mistake)
        # Two sweeps, in each 12 warps with a pair: under 150. Every warp in each step: over 190.
        yield require(
            counts.shared_requests <= 150 * counts.blocks,
            f"{check}: work",
            f"{counts.shared_requests / counts.blocks:.0f} accesses of warps to shared memory for "
            "each block, and two "
            "sweeps need under 150: does every thread work in every step?",
        )
