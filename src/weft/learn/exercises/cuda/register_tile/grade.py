"""Grade the product, and the accesses to shared memory for each multiplication."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, quarters, require

WRONG = "is tb[j][x] read once for the four sums?"
LUCKY = "outside of c"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* a, const float* b, float* c, int m, int n, int k)")
    odd = odd_sizes(generator, low=17, high=90, count=3)
    for m, n, k in ((128, 32, 64), (odd[0], odd[1], odd[2]), (1, 1, 1), (65, 5, 17)):
        a = quarters(generator, -9, 9, (m, k))
        b = quarters(generator, -9, 9, (k, n))
        c, check = program.empty("c", (m, n)), f"m, n, k = {m}, {n}, {k}"
        counts = program.call("run", program.array("a", a), program.array("b", b), c, m, n, k, case=check)
        yield compare(check, c.read(), a @ b)
        # For each warp and step: 5 writes of the tiles, and 5 reads for each of the 16 values of j.
        limit = counts.threads // 32 * -(-k // 16) * (5 + 16 * 5)
        yield require(
            counts.shared_requests <= limit,
            f"{check}: shared memory",
            f"{counts.shared_requests} accesses of warps to shared memory, expected {limit} at most: "
            "is tb[j][x] read "
            "once for the four sums?",
        )
