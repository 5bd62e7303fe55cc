"""Grade GELU near 0, around 10, and at magnitudes where the cube overflows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.triton_launch import Guarded, launch, unwritten

WRONG = "is NaN for x = -"
LUCKY = "must not limit the factor x"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    # Each range holds both signs; x = 1e30 has a cube that is infinite in float32.
    for low, high in ((0.0, 3.0), (3.0, 10.0), (10.0, 1e30)):
        for n, block in ((64, 64), (101, 32), (1, 16)):
            case = f"x from {low:g} to {high:g} and negative, n = {n}, BLOCK = {block}"
            # Below 10 the magnitudes are uniform, above they are spread over the powers of ten.
            share = generator.random(n)
            size = low + (high - low) * share if low < 10 else low * (high / low) ** share
            size[-1] = high
            x = (size * generator.choice([-1.0, 1.0], n)).astype(np.float32)
            if n > 1:
                x[:2] = high, -high
            y = unwritten("y", n)
            grid = (-(-n // block),)
            launch(candidate, "gelu_kernel", grid, case, [Guarded("x", x), y, n], outputs=[y], BLOCK=block)
            expected = _gelu(x.astype(np.float64))
            yield compare(case, y.numpy(), expected, tolerance=2e-6, mistake=partial(_mistake, x))


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _mistake(x: np.ndarray, y: np.ndarray) -> str:
    spoiled = x[np.isnan(y)]
    if not len(spoiled) and np.abs(y).max() < np.abs(x).max() / 2:
        return "GELU of a large x is x: a limit on x inside of u must not limit the factor x"
    if not len(spoiled):
        return ""
    return f"The result is NaN for x = {spoiled[np.abs(spoiled).argmin()]:.4g}: infinity divided by infinity"
