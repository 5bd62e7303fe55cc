"""Grade a * x + y for sizes at, below and above multiples of the block."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.lockstep import kernel_of, run_in_lockstep, run_in_simulator

WRONG = "no element of the second block"
LUCKY = "out of bounds"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    kernel = kernel_of(candidate, "axpy_kernel")
    for n, threads in ((64, 32), (32, 32), (100, 32), (1, 64), (2 * int(generator.integers(20, 90)) + 1, 16)):
        case = f"n = {n}, {threads} threads a block"
        x, y = generator.standard_normal((2, n)).astype(np.float32)
        a, grid = np.float32(generator.uniform(1, 2)), (-(-n // threads),)
        expected = a.astype(np.float64) * x + y
        for order in ("ascending", "descending"):
            out = np.full(n, np.nan, np.float32)
            arguments = (a, x.copy(), y.copy(), out)
            run_in_lockstep(kernel, grid, (threads,), arguments, case, descending=order == "descending")
            yield compare(
                f"{case}, {order}", out, expected, tolerance=1e-6, mistake=partial(_mistake, threads)
            )
    out = np.full(n, np.nan, np.float32)
    run_in_simulator(kernel, grid, (threads,), (a, x, y, out), case)
    yield compare(f"{case}, in numba's simulator", out, expected, tolerance=1e-6)


def _mistake(threads: int, out: np.ndarray) -> str:
    if np.isnan(out[threads:]).all() and not np.isnan(out[:threads]).any():
        return "There is no element of the second block or a later one: is the block's number in the index?"
    return ""
