"""Grade the sum below, at and above the number of threads, which must be 256."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, require

MISTAKE = "Two threads compute one element: where does a thread begin, and how far is its next element?"
WRONG = "Two threads compute one element"
LUCKY = "Only the first 256 elements are computed"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, float* y, float a, int n)")
    a = float(np.float32(generator.uniform(1.5, 3)))
    for n in (256, 200, 1, *odd_sizes(generator, low=600, high=5000)):
        x = generator.standard_normal(n, dtype=np.float32)
        before = generator.standard_normal(n, dtype=np.float32)
        y = program.array("y", before)
        counts = program.call("run", program.array("x", x), y, a, n, case=f"n = {n}", on_race=MISTAKE)
        yield require(
            (counts.launches, counts.threads) == (1, 256),
            f"n = {n}: launch",
            f"expected one launch of 256 threads, got {counts.launches} with {counts.threads}",
        )

        def mistake(output: np.ndarray, before: np.ndarray = before) -> str:
            unchanged = output == before
            if unchanged[256:].all() and not unchanged[:256].any():
                return "Only the first 256 elements are computed: each thread needs a loop"
            return ""

        yield compare(f"n = {n}", y.read(), np.float32(a) * x + before, tolerance=1e-6, mistake=mistake)
