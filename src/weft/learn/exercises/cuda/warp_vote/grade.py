"""Grade the kept elements, their number, and the places behind them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, quarters, require

WRONG = "a lane counts its own vote too"
LUCKY = "which its mask names"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, float* y, int* kept, int n)")
    for n in (64, 320, 1, *odd_sizes(generator, low=33, high=500)):
        x = quarters(generator, -9, 9, n)
        warps, check = -(-n // 32), f"n = {n}"
        y, numbers_device = (
            program.array("y", np.full(32 * warps, -1, np.float32)),
            program.empty("kept", warps, np.int32),
        )
        counts = program.call("run", program.array("x", x), y, numbers_device, n, case=check)
        expected, numbers = np.full(32 * warps, -1, np.float32), np.zeros(warps, np.int32)
        for warp in range(warps):
            positive = x[32 * warp : 32 * warp + 32]
            positive = positive[positive > 0]
            expected[32 * warp : 32 * warp + len(positive)] = positive
            numbers[warp] = len(positive)

        def mistake(output: np.ndarray, expected: np.ndarray = expected) -> str:
            is_shifted = (output[1:32] == expected[:31]).all()
            return "Everything is one place too far: a lane counts its own vote too" if is_shifted else ""

        yield compare(f"{check}: y", y.read(), expected, mistake=mistake)
        yield compare(f"{check}: kept", numbers_device.read(), numbers)
        yield require(counts.shuffles > 0, f"{check}: vote", "the lanes do not vote")
