"""Grade the norm with means far from 0, in full and in partial blocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.triton_launch import Guarded, launch, unwritten

WRONG = "Masked lanes enter the variance"
LUCKY = "loses its digits"


EPS = 1e-5


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    for offset in (0.0, 2.0, -3000.0, 3000.0):
        for rows, cols, block in ((2, 64, 64), (3, 45, 64), (2, 1, 16), (1, 300, 512)):
            case = f"mean {offset:g}, {rows} x {cols}, BLOCK = {block}"
            x = (generator.standard_normal((rows, cols)) + offset).astype(np.float32)
            w, b = generator.standard_normal((2, cols)).astype(np.float32)
            outputs = [unwritten("y", rows, cols), unwritten("mean", rows), unwritten("rstd", rows)]
            arguments = [Guarded("x", x), Guarded("w", w), Guarded("b", b), *outputs, cols, EPS]
            launch(candidate, "layer_norm_kernel", (rows,), case, arguments, outputs=outputs, BLOCK=block)
            y, mean, rstd = (output.numpy() for output in outputs)
            exact = x.astype(np.float64)
            exact_mean, var = exact.mean(1), exact.var(1)
            yield compare(f"mean, {case}", mean, exact_mean, tolerance=1e-6)
            # A variance of 1 comes from numbers of the size of the offset, each rounded to float32.
            exact_rstd, tolerance = 1 / np.sqrt(var + EPS), 1e-5 + abs(offset) * 1e-6
            spoiled = 1 / np.sqrt(var + EPS + (block - cols) / cols * exact_mean**2)
            yield compare(
                f"rstd, {case}",
                rstd,
                exact_rstd,
                tolerance=tolerance,
                mistake=partial(_mistake, spoiled, offset),
            )
            expected = (exact - exact_mean[:, None]) * exact_rstd[:, None] * w + b
            yield compare(f"y, {case}", y, expected, tolerance=4 * tolerance)


def _mistake(spoiled: np.ndarray, mean: float, rstd: np.ndarray) -> str:
    if np.allclose(rstd, spoiled, rtol=1e-3):
        return "Masked lanes enter the variance: they are -mean after the subtraction"
    if abs(mean) > 1000:
        return "Rows near 0 were right: mean(x^2) - mean^2 loses its digits where the mean is large"
    return ""
