"""Grade the reversed blocks, full and ragged; the emulator finds races and barriers that hang."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_checks import require_shared, require_through_shared
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes

WRONG = "Is a barrier missing?"
LUCKY = "waits in __syncthreads"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    yield require_shared(candidate, "tile")
    program = Program(candidate, "void run(const float* x, float* y, int n)")
    for n in (128, 1, 63, 65, *odd_sizes(generator, low=70, high=700)):
        x, y = generator.standard_normal(n, dtype=np.float32), program.empty("y", n)
        counts = program.call("run", program.array("x", x), y, n, case=f"n = {n}")
        expected = np.concatenate([x[i : i + 64][::-1] for i in range(0, n, 64)])
        yield compare(f"n = {n}", y.read(), expected)
        yield require_through_shared(f"n = {n}", counts, name="tile", source="x", elements=n)
