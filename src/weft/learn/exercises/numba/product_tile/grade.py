"""Grade products of odd sizes with several tile widths, one thread at a time in both orders."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.lockstep import kernel_of, run_in_lockstep, run_in_simulator

WRONG = "is a barrier missing?"
LUCKY = "t = 8 passed"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    kernel = kernel_of(candidate, "product_kernel")
    shapes = ((8, 8, 16, 8), (9, 11, 13, 8), (4, 6, 8, 4), (5, 3, 7, 3), (1, 1, 1, 2))
    for m, n, k, t in shapes:
        case = f"M = {m}, N = {n}, K = {k}, t = {t}"
        a = generator.standard_normal((m, k)).astype(np.float32)
        b = generator.standard_normal((k, n)).astype(np.float32)
        expected, grid = a.astype(np.float64) @ b.astype(np.float64), (-(-n // t), -(-m // t))
        shared = 2 * t * t * 4
        for order in ("ascending", "descending"):
            c = np.full((m, n), np.nan, np.float32)
            arguments, down = (a.copy(), b.copy(), c), order == "descending"
            run_in_lockstep(
                kernel, grid, (t, t), arguments, case, shared_bytes=shared, descending=down, hint=_width(t)
            )
            mistake = partial(_mistake, t, ragged=k % t > 0)
            yield compare(f"{case}, {order}", c, expected, tolerance=1e-5, mistake=mistake)
    run_in_simulator(kernel, grid, (t, t), (a, b, c), case, shared_bytes=shared)
    yield compare(f"{case}, in numba's simulator", c, expected, tolerance=1e-5)


def _width(t: int) -> str:
    return "" if t == 8 else f"t = 8 passed, and here t = {t}: read it from cuda.blockDim.x"


def _mistake(t: int, c: np.ndarray, *, ragged: bool) -> str:
    if ragged and t == 8:
        return "t does not divide K: elements of a tile that do not exist must be 0 in each step"
    if t != 8:
        return _width(t)
    return "Threads run one after the other here, each up to the next barrier: is a barrier missing?"
