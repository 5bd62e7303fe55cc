"""Grade the sums in one block and in several, with the bytes loaded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_checks import require_active
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, require

WRONG = "of tile, which nothing has written"
LUCKY = "at the edge of a block"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, const float* weights, float* y, int n)")
    for n in (100, 128, 1, 3, *odd_sizes(generator, low=257, high=2000)):
        x = generator.standard_normal(n, dtype=np.float32)
        weights = generator.standard_normal(9, dtype=np.float32)
        y, check = program.empty("y", n), f"n = {n}"
        counts = program.call("run", program.array("x", x), weights.copy(), y, n, case=check)
        expected = np.convolve(
            np.pad(x.astype(np.float64), 4), weights[::-1].astype(np.float64), mode="valid"
        )

        def mistake(output: np.ndarray, expected: np.ndarray = expected) -> str:
            places = np.flatnonzero(np.abs(output - expected) > 1e-4) % 128
            if ((places < 4) | (places >= 124)).all():
                return (
                    "All wrong elements are at the edge of a block: does the halo come from the neighbours?"
                )
            return ""

        yield compare(check, y.read(), expected, tolerance=1e-5, mistake=mistake)
        limit = 4 * (n + 8 * counts.blocks)
        yield require(
            counts.load_bytes <= limit,
            f"{check}: loads",
            f"{counts.load_bytes} bytes were loaded from global memory, and tiles with halos need {limit}",
        )
        yield require_active(check, counts, share=0.7)
