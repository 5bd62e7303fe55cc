"""Grade the result and the sectors that each warp touches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_checks import require_coalesced
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes

WRONG = "Let neighbouring threads access neighbouring elements"
LUCKY = "was never written"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(
        candidate, "void run(const float* x, const float* factor, float* y, int rows, int columns)"
    )
    odd = odd_sizes(generator, low=65, high=200, count=3)
    for rows, columns in ((64, 128), (odd[0], odd[1]), (3, odd[2]), (100, 64), (2, 1024 + odd[2])):
        check = f"{rows} rows, {columns} columns"
        x = generator.standard_normal((rows, columns), dtype=np.float32)
        factor = generator.standard_normal(rows, dtype=np.float32)
        y = program.empty("y", (rows, columns))
        x_device, factor_device = program.array("x", x), program.array("factor", factor)
        counts = program.call("run", x_device, factor_device, y, rows, columns, case=check)
        yield compare(check, y.read(), factor[:, None] * x)
        yield require_coalesced(check, counts)
