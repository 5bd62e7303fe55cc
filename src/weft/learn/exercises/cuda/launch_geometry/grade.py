"""Grade the labels at the geometry of the picture, and at other ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, require

WRONG = "x is fastest"
LUCKY = "outside of cells"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(int* cells, int bx, int by, int tx, int ty)")
    shapes = [(3, 2, 5, 3), (1, 1, 7, 1), (5, 1, 2, 6)]
    bx, by, tx, ty = (int(v) for v in generator.integers(4, 9, size=4))
    shapes.append((bx, by, tx, ty))
    for bx, by, tx, ty in shapes:
        check = f"{bx} x {by} blocks of {tx} x {ty} threads"
        cells = program.empty("cells", (by * ty, bx * tx), np.int32)
        counts = program.call("run", cells, bx, by, tx, ty, case=check)
        yield require(
            (counts.blocks, counts.threads) == (bx * by, bx * by * tx * ty),
            f"{check}: launch",
            f"expected {bx * by} blocks with {bx * by * tx * ty} threads together, got {counts.blocks} with "
            f"{counts.threads}",
        )
        row, column = np.indices((by * ty, bx * tx))
        thread = row % ty * tx + column % tx
        block = row // ty * bx + column // tx

        def mistake(output: np.ndarray, block: np.ndarray = block, thread: np.ndarray = thread) -> str:
            if (output // 1000 == block).all():
                return "The blocks' numbers are right, and the threads' are not: x is fastest"
            return "The blocks' numbers are wrong: x is fastest" if (output % 1000 == thread).all() else ""

        yield compare(check, cells.read(), 1000 * block + thread, mistake=mistake)
