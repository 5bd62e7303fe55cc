"""Grade the reversed rows at short and long rows; the emulator knows the bytes that the launch asked for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_checks import require_coalesced, require_shared, require_through_shared
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes

WRONG = "the launch gives 64 bytes of shared memory, 16 elements"
LUCKY = "the launch gives 1024 bytes of shared memory, 256 elements"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    yield require_shared(candidate, "row")
    program = Program(candidate, "void run(const float* x, float* y, int rows, int columns)")
    odd = odd_sizes(generator, low=65, high=255, count=2)
    for rows, columns in ((4, 64), (3, odd[0]), (5, 1), (2, 300 + odd[1]), (1, 1000)):
        check = f"{rows} rows, {columns} columns"
        x, y = (
            generator.standard_normal((rows, columns), dtype=np.float32),
            program.empty("y", (rows, columns)),
        )
        counts = program.call("run", program.array("x", x), y, rows, columns, case=check)
        yield compare(check, y.read(), x[:, ::-1])
        yield require_through_shared(check, counts, name="row", source="x", elements=rows * columns)
        yield require_coalesced(check, counts)
