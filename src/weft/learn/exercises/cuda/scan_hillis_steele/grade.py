"""Grade the prefix sums of each 256 elements."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, quarters, require

WRONG = "Is a barrier between reading and writing s?"
LUCKY = "Are there eight steps?"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, float* y, int n)")
    for n in (32, 256, 512, 1, *odd_sizes(generator, low=257, high=1500)):
        x = quarters(generator, 1, 9, n)
        y, check = program.empty("y", n), f"n = {n}"
        counts = program.call(
            "run",
            program.array("x", x),
            y,
            n,
            case=check,
            on_race="Is a barrier between reading and writing s?",
        )
        expected = np.concatenate([np.cumsum(x[i : i + 256]) for i in range(0, n, 256)])

        def mistake(output: np.ndarray, expected: np.ndarray = expected) -> str:
            differs = np.flatnonzero(output != expected)
            return (
                "The first 32 elements of a block are right. Are there eight steps?"
                if differs[0] == 32
                else ""
            )

        yield compare(check, y.read(), expected, mistake=mistake)
        yield require(
            counts.barriers >= 8 * counts.blocks,
            f"{check}: steps",
            "expected eight steps with barriers in each block",
        )
