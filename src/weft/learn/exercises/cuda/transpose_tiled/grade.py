"""Grade the transposed matrix, the sectors of both sides, and the bank conflicts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_checks import require_coalesced, require_conflict_free
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes

WRONG = "lanes access different words of one bank"
LUCKY = "of tile, which nothing has written"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, float* y, int rows, int columns)")
    odd = odd_sizes(generator, low=41, high=61, count=2)
    for rows, columns in ((64, 64), (33, 33), (odd[0], odd[0] + 30), (70 + odd[1], odd[1]), (1, 65)):
        check = f"{rows} rows, {columns} columns"
        x, y = (
            generator.standard_normal((rows, columns), dtype=np.float32),
            program.empty("y", (columns, rows)),
        )
        counts = program.call("run", program.array("x", x), y, rows, columns, case=check)
        yield compare(check, y.read(), x.T)
        # A last tile of one column has stores of one element in each row: there is nothing to coalesce.
        if min(rows, columns) >= 32:
            yield require_coalesced(check, counts)
            yield require_conflict_free(check, counts)
