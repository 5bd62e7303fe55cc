"""Grade sums of blocks of several widths in both orders of threads, so that each barrier counts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.lockstep import kernel_of, run_in_lockstep, run_in_simulator

WRONG = "is a barrier missing?"
LUCKY = "not a power of two"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    kernel = kernel_of(candidate, "block_sum_kernel")
    for n, threads in ((64, 32), (16, 16), (45, 16), (1, 8), (60, 24), (75, 37), (5, 1)):
        case = f"n = {n}, {threads} threads a block"
        x = (generator.standard_normal(n) + 1).astype(np.float32)
        blocks = -(-n // threads)
        starts = range(0, n, threads)
        expected = np.array([x[s : s + threads].astype(np.float64).sum() for s in starts])
        for order in ("ascending", "descending"):
            out = np.full(blocks, np.nan, np.float32)
            arguments = (x.copy(), out)
            run_in_lockstep(kernel, (blocks,), (threads,), arguments, case, descending=order == "descending")
            mistake = partial(_mistake, threads, x[::threads])
            yield compare(f"{case}, {order}", out, expected, tolerance=1e-5, mistake=mistake)
    x, out = np.arange(50, dtype=np.float32), np.full(3, np.nan, np.float32)
    run_in_simulator(kernel, (3,), (20,), (x, out), "n = 50, 20 threads a block")
    yield compare("n = 50, 20 threads a block, in numba's simulator", out, np.array([190.0, 590, 445]))


def _mistake(threads: int, first: np.ndarray, out: np.ndarray) -> str:
    if np.isnan(out).all():
        return "No thread wrote out[block]"
    if (out == first).all():
        return "That is the first element of each block: nothing was added to it"
    if threads & (threads - 1):
        return f"{threads} is not a power of two: what becomes of the middle value of an odd step?"
    return "Threads run one after the other here, each up to the next barrier: is a barrier missing?"
