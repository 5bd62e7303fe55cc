"""Grade the mask: its share of zeros, and that seed and position alone decide it, backward too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare, require
from weft.learn.probes.triton_launch import Guarded, launch, unwritten

WRONG = "repeats"
LUCKY = "another BLOCK"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    n = 1009
    x, dy = (np.abs(generator.standard_normal((2, n))) + 0.5).astype(np.float32)
    for p in (0.1, 0.5):
        seed = int(generator.integers(1, 2**31))
        case = f"p = {p}, n = {n}"
        y = _run(candidate, "dropout_kernel", x, p, seed, 64)
        mask = y != 0
        yield compare(f"values, {case}", y, np.where(mask, x.astype(np.float64) / (1 - p), 0), tolerance=1e-6)
        blocks = mask[: n // 64 * 64].reshape(-1, 64)
        repeated = len(blocks) - len(np.unique(blocks, axis=0))
        reason = "the mask repeats from block to block: the counter must be the element's position"
        yield require(repeated <= len(blocks) // 2, f"blocks differ, {case}", reason)
        # Five standard deviations of the share of n independent draws.
        deviation = abs(mask.mean() - (1 - p)) / np.sqrt(p * (1 - p) / n)
        reason = f"{1 - mask.mean():.3f} of the elements are 0, {deviation:.1f} standard deviations from p"
        yield require(deviation < 5, f"share of zeros, {case}", reason)
        other = _run(candidate, "dropout_kernel", x, p, seed, 128) != 0
        reason = "another BLOCK gives another mask: the counter must be the element's position"
        yield require((mask == other).all(), f"mask with BLOCK = 128, {case}", reason)
        dx = _run(candidate, "dropout_backward_kernel", dy, p, seed, 32)
        expected = np.where(mask, dy.astype(np.float64) / (1 - p), 0)
        yield compare(f"backward with BLOCK = 32, {case}", dx, expected, tolerance=1e-6)
        next_seed = _run(candidate, "dropout_kernel", x, p, seed + 1, 64) != 0
        reason = "the next seed gives the same mask"
        yield require((mask != next_seed).any(), f"another seed, {case}", reason)
    yield compare("p = 0", _run(candidate, "dropout_kernel", x, 0.0, 7, 64), x)


def _run(candidate: Candidate, kernel: str, x: np.ndarray, p: float, seed: int, block: int) -> np.ndarray:
    y, n, case = unwritten("output", len(x)), len(x), f"{kernel}, p = {p}, BLOCK = {block}"
    arguments = [Guarded("input", x), y, n, p, seed]
    launch(candidate, kernel, (-(-n // block),), case, arguments, outputs=[y], BLOCK=block)
    return y.numpy()
