"""Grade layer norm at short and long rows, near 0 and far from it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes

WRONG = "are the differences squared"
LUCKY = "divided by the number of columns"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(
        candidate,
        "void run(const float* x, const float* weight, const float* bias, float* y, int rows, int "
        "columns, float eps)",
    )
    odd = odd_sizes(generator, low=129, high=700, count=2)
    for rows, columns, offset in (
        (3, 128, 0),
        (2, odd[0], 0),
        (2, 60, 10),
        (2, odd[1], 1000),
        (2, 128, -3000),
    ):
        check = f"{rows} rows, {columns} columns, values near {offset}"
        x = (generator.standard_normal((rows, columns)) + offset).astype(np.float32)
        weight, bias = (generator.standard_normal(columns, dtype=np.float32) for _ in range(2))
        y = program.empty("y", (rows, columns))
        arrays = [program.array(n, v) for n, v in (("x", x), ("weight", weight), ("bias", bias))]
        program.call("run", *arrays, y, rows, columns, 1e-5, case=check)
        centred = x.astype(np.float64) - x.mean(axis=1, keepdims=True, dtype=np.float64)
        rstd = 1 / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)

        def mistake(output: np.ndarray, columns: int = columns, offset: int = offset) -> str:
            if abs(offset) > 100:
                return "Values near 0 pass, and these do not: are the differences squared, not the values?"
            return "128 columns pass: is each sum divided by the number of columns?" if columns != 128 else ""

        yield compare(check, y.read(), centred * rstd * weight + bias, tolerance=2e-3, mistake=mistake)
