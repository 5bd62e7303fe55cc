"""Grade the sum at square matrices first, then at others with ragged edges."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import Refused, compare, odd_sizes

WRONG = "Is the mask true for a column beyond the edge?"
LUCKY = "a row is columns elements long"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(
        candidate, "void run(const float* x, const float* bias, float* y, int rows, int columns)"
    )
    odd = odd_sizes(generator, low=17, high=70, count=4)
    for rows, columns in (
        (32, 32),
        (20, 20),
        (odd[0], odd[0] + 2),
        (odd[1] + 20, odd[1]),
        (1, odd[2]),
        (odd[3], 1),
    ):
        x = generator.standard_normal((rows, columns), dtype=np.float32)
        bias = generator.standard_normal(columns, dtype=np.float32)
        y, check = program.empty("y", (rows, columns)), f"{rows} rows, {columns} columns"
        try:
            program.call(
                "run", program.array("x", x), program.array("bias", bias), y, rows, columns, case=check
            )
            output = y.read()
        except Refused as refused:
            if "outside" not in refused.reason and "race" not in refused.reason:
                raise
            if rows == columns:
                raise Refused(check, f"{refused.reason}. {_question(refused.reason, rows)}") from refused
            raise Refused(
                check, f"{refused.reason}. Square matrices pass: a row is columns elements long"
            ) from refused
        yield compare(check, output, x + bias)


def _question(reason: str, rows: int) -> str:
    """Ask about the row where the thread's row is too far, and otherwise about the column."""
    thread = re.search(r"thread \(\d+, (\d+)\) of block (?:(\d+)|\(\d+, (\d+)\))", reason)
    row = int(thread[1]) + 16 * int(thread[3] or 0) if thread else 0
    if row >= rows:
        return f"That thread's row is {row} of {rows}: is the mask true for a row beyond the edge?"
    return "Is the mask true for a column beyond the edge?"
