"""Grade sums of rows of several blocks, with an incomplete last one, and where float16 stops."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.triton_launch import Guarded, launch, unwritten

WRONG = "incomplete block"
LUCKY = "float16 stops"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    for name, rows, cols, block in (
        ("small", 2, 64, 16),
        ("small", 3, 45, 16),
        ("small", 2, 5, 32),
        ("small", 1, 1, 16),
        ("large", 2, 999, 64),
        ("2048 and then ones, as", 2, 700, 16),
    ):
        case = f"{name} values, {rows} x {cols}, BLOCK = {block}"
        x, out = _rows(name, rows, cols, block, generator), unwritten("out", rows)
        arguments = [Guarded("x", x), out, cols]
        launch(candidate, "row_sum_kernel", (rows,), case, arguments, outputs=[out], BLOCK=block)
        expected = x.astype(np.float64).sum(1)
        tail = x[:, cols // block * block :].astype(np.float64).sum(1)
        yield compare(
            case,
            out.numpy(),
            expected,
            tolerance=1e-5 * np.abs(x.astype(np.float64)).sum(1).max() / max(1.0, np.abs(expected).min()),
            mistake=partial(_mistake, expected, tail),
        )


def _rows(name: str, rows: int, cols: int, block: int, generator: np.random.Generator) -> np.ndarray:
    if name.startswith("2048"):
        return np.where(np.arange(cols) < block, 2048, np.ones((rows, cols))).astype(np.float16)
    x = generator.standard_normal((rows, cols))
    return (np.abs(x) * 1000 if name == "large" else x).astype(np.float16)


def _mistake(exact: np.ndarray, tail: np.ndarray, sums: np.ndarray) -> str:
    if tail.any() and np.allclose(sums, exact - tail, rtol=1e-3, atol=1e-2):
        return "The last, incomplete block is missing"
    if np.isinf(sums).any() or np.allclose(sums, exact, rtol=0.05, atol=0.05):
        return "A sum in float16 stops at 2048 ones, and above 65504 it is infinite: convert after the load"
    return ""
