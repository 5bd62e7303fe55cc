"""Grade the result in host memory when run returns, and the time line of the operations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, require

WRONG = "which nothing has written"
LUCKY = "Does run wait for them?"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, float* y, int n)")
    for n in (4096, 1, 3, 20001, *odd_sizes(generator, low=5000, high=12000, count=2)):
        x, check = generator.standard_normal(n, dtype=np.float32), f"n = {n}"
        y = np.full(n, np.nan, np.float32)
        program.pin(x)
        program.pin(y)
        counts = program.call("run", x, y, n, case=check)
        expected = x * x + np.float32(1)
        yield compare(check, y, expected, tolerance=1e-6, mistake=_mistake)
        share = counts.timeline / counts.serial_time
        yield require(
            n < 4096 or share <= 0.7,
            f"{check}: time line",
            f"{counts.timeline} units of time for operations of {counts.serial_time} units together "
            f"({share:.0%}), "
            "expected at most 70%: which of them are in one stream, or wait for the host?",
        )


def _mistake(output: np.ndarray) -> str:
    is_late = np.isnan(output).any()
    return "Operations were not done when run returned. Does run wait for them?" if is_late else ""
