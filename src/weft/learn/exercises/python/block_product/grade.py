"""Grade the product and the blocks that met, for square and other shapes, whole and ragged blocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare, require

WRONG = "only the last"
LUCKY = "its own dimension"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    block_product = candidate.function("block_product")
    shapes = [(4, 4, 4, 2), (5, 5, 5, 2), (1, 1, 1, 3), (2, 7, 9, 3), (9, 4, 2, 4)]
    m, n, depth = (int(size) for size in generator.integers(5, 20, size=3))
    shapes.append((m, n, depth, 4))
    for m, n, depth, t in shapes:
        case = f"[{m}, {depth}] x [{depth}, {n}], t = {t}"
        a, b = generator.standard_normal((m, depth)), generator.standard_normal((depth, n))
        seen: list[tuple[np.ndarray, np.ndarray]] = []
        product = block_product(a.copy(), b.copy(), t, partial(_multiply, case, t, seen))
        blocks = -(-m // t) * -(-n // t) * -(-depth // t)
        reason = f"{blocks} pairs of blocks meet, and multiply was called {len(seen)} times: "
        reason += "does each loop run over its own dimension?"
        yield require(len(seen) == blocks, f"{case}, calls", reason)
        last = depth - 1 - (depth - 1) % t
        only_last = a[:, last:] @ b[last:]
        yield compare(case, product, a @ b, tolerance=1e-12, mistake=partial(_mistake, only_last))


def _multiply(case: str, t: int, seen: list[Any], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    shapes = f"blocks of the shapes {a.shape} and {b.shape}"
    fits = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] and max(a.shape + b.shape) <= t
    require(fits, case, f"{shapes} do not meet, or are larger than t")
    empty = min(a.shape + b.shape) == 0
    require(not empty, case, f"{shapes}: an empty block; does each loop run over its own dimension?")
    seen.append((a, b))
    return a @ b


def _mistake(only_last: np.ndarray, product: np.ndarray) -> str:
    last = np.allclose(product, only_last)
    return "That is only the last product of the sum over k: add them" if last else ""
