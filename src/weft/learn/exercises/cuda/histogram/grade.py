"""Grade the counts, and the number of atomic additions in global memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_checks import require_active
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, require

WRONG = "of own, which nothing has written"
LUCKY = "Are the additions atomic"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(candidate, "void run(const int* bins, int* counts, int n)")
    for n in (2048, 1, *odd_sizes(generator, low=600, high=5000)):
        # Some bins are much more frequent than others, and some are empty.
        bins = (64 * generator.random(n) ** 3).astype(np.int32)
        totals, check = program.array("counts", np.zeros(64, np.int32)), f"n = {n}"
        counts = program.call(
            "run",
            program.array("bins", bins),
            totals,
            n,
            case=check,
            on_race="Are the additions atomic, with barriers between the phases?",
        )
        yield require(
            counts.threads == 512, f"{check}: launch", f"expected 512 threads, got {counts.threads}"
        )
        yield require(
            counts.global_atomics <= 4 * 64,
            f"{check}: atomics",
            f"{counts.global_atomics} atomic additions in global memory; 4 blocks with 64 bins each "
            "need 256 at most",
        )
        yield require_active(check, counts, share=0.7)
        yield compare(check, totals.read(), np.bincount(bins, minlength=64))
