"""Grade softmax of short and long, small, large and rising rows, and the number of times x is read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, require

WRONG = "Rows sum to"
LUCKY = "large values"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, float* y, int rows, int columns)")
    odd = odd_sizes(generator, low=129, high=700, count=2)
    cases = [(3, 256, 0, 1), (2, odd[0], 0, 3), (4, 1, 0, 1), (2, 100, 300, 5), (2, odd[1], -500, 5)]
    for rows, columns, offset, spread in cases:
        check = f"{rows} rows, {columns} columns, values near {offset}"
        x = (generator.standard_normal((rows, columns)) * spread + offset).astype(np.float32)
        x[0].sort()  # each element is a new maximum
        y = program.empty("y", (rows, columns))
        counts = program.call("run", program.array("x", x), y, rows, columns, case=check)
        powers = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))

        def mistake(output: np.ndarray, offset: int = offset) -> str:
            if not np.isfinite(output).all():
                return (
                    "exp overflows for large values: is the maximum subtracted?"
                    if offset
                    else "NaN or infinity"
                )
            return (
                f"Rows sum to {output.sum(axis=1).min():.3g} to {output.sum(axis=1).max():.3g}, and not to 1"
            )

        yield compare(
            check, y.read(), powers / powers.sum(axis=1, keepdims=True), tolerance=1e-5, mistake=mistake
        )
        yield require(
            counts.load_bytes <= 2 * x.nbytes,
            f"{check}: passes",
            f"x is read {counts.load_bytes / x.nbytes:.1f} times, and two passes are enough",
        )
