"""Grade the number of blocks by its definition, at multiples of the block, beside them, and beyond 2^53."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require

WRONG = "one block too many where threads divides n"
LUCKY = "a float has 53 bits"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    blocks, idle = candidate.function("blocks"), candidate.function("idle")
    threads = int(generator.integers(2, 33)) * 32
    quotient = int(generator.integers(5, 1000))
    for n in (0, 1, threads - 1, threads, threads + 1, quotient * threads, quotient * threads + 7):
        yield _check(blocks, idle, n, threads)
    yield _check(blocks, idle, (2**60 + quotient) * threads + 1, threads)


def _check(blocks, idle, n: int, threads: int) -> str:
    expected = n // threads + (n % threads > 0)
    check, actual = f"blocks({n}, {threads})", blocks(n, threads)
    reason = f"expected {expected}, got {actual}"
    if n % threads == 0 and actual == expected + 1:
        reason += ". That is one block too many where threads divides n"
    elif n >= 2**53 and abs(actual - expected) < 2**40:
        reason += ". Divide integers: a float has 53 bits"
    elif actual == expected - 1:
        reason += ". The last block, which is not full, is missing: round up"
    require(actual == expected, check, reason)
    left = idle(n, threads)
    return require(
        left == expected * threads - n, check, f"idle: expected {expected * threads - n}, got {left}"
    )
