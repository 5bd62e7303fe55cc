"""Grade the product at even and ragged sizes, and the bytes loaded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, quarters, require

MISTAKE = "Are there two barriers in each step?"
WRONG = MISTAKE
LUCKY = "Only sizes with a ragged k are wrong"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* a, const float* b, float* c, int m, int n, int k)")
    odd = odd_sizes(generator, low=17, high=70, count=5)
    for m, n, k in ((32, 48, 64), (odd[0], odd[1], 32), (odd[2], odd[3], odd[4]), (1, 1, 1), (5, 40, 3)):
        a = quarters(generator, -9, 9, (m, k))
        b = quarters(generator, -9, 9, (k, n))
        c, check = program.empty("c", (m, n)), f"m, n, k = {m}, {n}, {k}"
        counts = program.call(
            "run", program.array("a", a), program.array("b", b), c, m, n, k, case=check, on_race=MISTAKE
        )

        def mistake(output: np.ndarray, k: int = k) -> str:
            return "Only sizes with a ragged k are wrong: tiles must hold 0 beyond the edge" if k % 16 else ""

        yield compare(check, c.read(), a @ b, mistake=mistake)
        tiles = -(-m // 16) * -(-n // 16)
        limit = tiles * k * 2 * 16 * 4
        yield require(
            counts.load_bytes <= limit,
            f"{check}: loads",
            f"{counts.load_bytes} bytes were loaded from global memory, and tiles of 16 x 16 need "
            f"{limit} at most",
        )
