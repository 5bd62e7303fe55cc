"""Grade the result at all remainders of a division by 4, and the number of accesses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, require

WRONG = "outside of x"
LUCKY = "was never written"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, float* y, float a, int n)")
    a = float(np.float32(generator.uniform(1.5, 3)))
    base = int(generator.integers(100, 500)) * 4
    for n in (1024, base, base + 1, base + 2, base + 3, 1, *odd_sizes(generator, low=5, high=300, count=1)):
        x, y = generator.standard_normal(n, dtype=np.float32), program.empty("y", n)
        counts = program.call("run", program.array("x", x), y, a, n, case=f"n = {n}")
        yield compare(f"n = {n}", y.read(), np.float32(a) * x)
        # One load for each warp with float4s, and up to three for the tail, if one thread takes all of it.
        expected = -(-(n // 4) // 32) + n % 4
        for kind, requests in (("loads", counts.load_requests), ("stores", counts.store_requests)):
            yield require(
                requests <= expected,
                f"n = {n}: {kind}",
                f"{requests} {kind} of warps, and float4s need {expected}: are there single floats "
                "beside the tail?",
            )
