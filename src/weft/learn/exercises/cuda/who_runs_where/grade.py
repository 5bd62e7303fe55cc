"""Grade the words before the functions, and the result in host memory with a launch behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, require

WRONG = "memory that is not the device's: a host pointer"
LUCKY = "no kernel ran"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const float* x, float* y, int n)")
    for word, name in (("__device__", "square"), ("__global__", "square_all")):
        yield require(
            re.search(rf"{word}\s[\w\s]*\b{name}\s*\(", candidate.text) is not None,
            f"the word before {name}",
            f"expected {word} before {name}: "
            f"{'a kernel calls it' if name == 'square' else 'the host launches it'}",
        )
    for n in (1, 100, 1024, *odd_sizes(generator, low=3, high=1000, count=2)):
        x = generator.standard_normal(n, dtype=np.float32)
        y = np.full(n, np.nan, np.float32)
        counts = program.call("run", x.copy(), y, n, case=f"n = {n}")
        yield require(
            counts.launches > 0, f"n = {n}: launches", "no kernel ran: the host computed, or nothing did"
        )
        yield compare(f"n = {n}", y, x * x, mistake=_mistake)
        yield require(
            not counts.unfreed,
            f"n = {n}: free",
            f"{counts.unfreed} was not freed: cudaFree({counts.unfreed});",
        )


def _mistake(output: np.ndarray) -> str:
    return "Nothing was copied to y, or too few bytes (a float has 4)" if np.isnan(output).all() else ""
