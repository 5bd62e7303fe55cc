"""Grade products of odd sizes in every dimension, and of a K so long that float16 overflows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.triton_launch import Guarded, launch, unwritten

WRONG = "the load needs a mask"
LUCKY = "float16 accumulator"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    for name, m, n, k in (
        ("small", 16, 16, 32),
        ("small", 33, 19, 16),
        ("small", 5, 7, 3),
        ("small", 17, 40, 45),
        ("small", 1, 1, 1),
        ("positive", 16, 20, 401),
    ):
        case = f"{name} values, M = {m}, N = {n}, K = {k}"
        a, b = generator.standard_normal((m, k)), generator.standard_normal((k, n))
        if name == "positive":
            a, b = np.abs(a) * 20, np.abs(b) * 20
        a, b = a.astype(np.float16), b.astype(np.float16)
        c = unwritten("C", m, n)
        arguments = [Guarded("A", a), Guarded("B", b), c, m, n, k]
        tiles = {"BM": 16, "BN": 16, "BK": 16}
        grid = (-(-m // 16), -(-n // 16))
        launch(candidate, "matmul_kernel", grid, case, arguments, outputs=[c], **tiles)
        expected = a.astype(np.float64) @ b.astype(np.float64)
        # Values that cancel are judged by the size of what was added.
        sizes = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
        error = c.numpy() - expected
        yield compare(
            case,
            np.where(np.abs(error) <= 1e-5 * sizes, expected, c.numpy()),
            expected,
            mistake=partial(_mistake, expected, sizes, k % 16),
        )


def _mistake(exact: np.ndarray, sizes: np.ndarray, ragged: int, c: np.ndarray) -> str:
    if np.isinf(c).any() or (np.abs(c - exact) < 0.02 * sizes + 0.02).all():
        return "The digits of a float16 accumulator: it must be float32"
    if ragged and not (c == 0).all():
        return "16 does not divide K: what lies behind K must be loaded as 0"
    return ""
