"""Grade the merge on random triples in both groupings, and on neutral states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from weft.learn.candidate import Candidate
from weft.learn.grading import compare, require

WRONG = "two neutral states"
LUCKY = "a large maximum overflows"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    merge = candidate.function("merge")
    for name, scale in (("small", 1.0), ("large", 300.0), ("huge", 1e30)):
        x, y, z = (_pieces(400, scale, generator) for _ in range(3))
        a, b, c = _state(x), _state(y), _state(z)
        yield from _matches(f"a b, {name} values", _merged(merge, a, b), (x, y))
        left = _merged(merge, _merged(merge, a, b), c)
        yield from _matches(f"(a b) c, {name} values", left, (x, y, z))
        right = _merged(merge, a, _merged(merge, b, c))
        yield from _matches(f"a (b c), {name} values", right, (x, y, z))
    neutral = np.full(4, -np.inf, np.float32), np.zeros(4, np.float32)
    state = np.array([1, -2, 1e30, -np.inf], np.float32), np.array([1, 3.5, 2, 0], np.float32)
    for case, a, b, expected in (
        ("two neutral states", neutral, neutral, neutral),
        ("a neutral state on the left", neutral, state, state),
        ("a neutral state on the right", state, neutral, state),
    ):
        for part, actual, exact in zip("ms", _merged(merge, a, b), expected, strict=True):
            yield compare(f"{part} of {case}", actual, exact)


def _pieces(count: int, scale: float, generator: np.random.Generator) -> np.ndarray:
    """Return pieces of rows; a third of the elements and a tenth of the whole pieces are minus infinity."""
    x = (generator.standard_normal((count, 5)) * scale).astype(np.float32)
    x[generator.random((count, 5)) < 0.3] = -np.inf
    x[generator.random(count) < 0.1] = -np.inf
    return x


def _state(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    m = x.astype(np.float64).max(1)
    shift = np.where(m == -np.inf, 0.0, m)
    return m.astype(np.float32), np.exp(x.astype(np.float64) - shift[:, None]).sum(1).astype(np.float32)


def _merged(merge: Any, a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    result = merge(*(torch.from_numpy(array.copy()) for array in (*a, *b)))
    pair = isinstance(result, tuple | list) and len(result) == 2
    tensors = pair and all(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in result)
    require(tensors, "result of merge", "expected the pair (m, s) of float32 tensors")
    return result[0].numpy(), result[1].numpy()


def _matches(case: str, merged: Any, pieces: Any) -> Iterator[str]:
    m, s = _state(np.concatenate(pieces, 1))

    def mistake(sums: np.ndarray) -> str:
        if np.isnan(sums[~np.isinf(m)]).any():
            return "NaN beside finite maxima: an exponential of a large maximum overflows"
        if np.isnan(sums[np.isinf(m)]).any():
            return "NaN for two neutral states: -inf - (-inf)"
        return ""

    yield compare(f"m of {case}", merged[0], m)
    yield compare(f"s of {case}", merged[1], s, tolerance=2e-6, mistake=mistake)
