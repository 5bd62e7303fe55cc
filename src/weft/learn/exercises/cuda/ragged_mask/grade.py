"""Grade the map at multiples of the block, beside them and below one block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, require

WRONG = "outside of x"
LUCKY = "never written"
RUN = "void run(const float* x, float* y, float a, int n)"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, RUN)
    a = float(np.float32(generator.uniform(1.5, 3)))
    for n in (256, 1, 127, 129, *odd_sizes(generator, low=200, high=2000)):
        x = generator.standard_normal(n, dtype=np.float32)
        y = program.empty("y", n)
        counts = program.call(
            "run",
            program.array("x", x),
            y,
            a,
            n,
            case=f"n = {n}",
            on_race="Does each thread have an i of its own?",
        )
        yield compare(f"n = {n}", y.read(), np.float32(a) * x)
        yield require(
            counts.threads < n + counts.threads // counts.blocks,
            f"n = {n}: launch",
            f"{counts.blocks} blocks have {counts.threads} threads for {n} elements: "
            "whole blocks have nothing to do",
        )
