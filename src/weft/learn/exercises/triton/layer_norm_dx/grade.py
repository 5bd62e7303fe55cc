"""Grade dx with w of ones and with random w, against automatic differentiation in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.triton_launch import Guarded, launch, unwritten

WRONG = "through the variance is missing"
LUCKY = "is g multiplied by w?"


EPS = 1e-5


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    for weights in ("ones", "random"):
        for rows, cols, block in ((2, 32, 32), (3, 21, 32), (2, 2, 16), (1, 77, 128)):
            case = f"w = {weights}, {rows} x {cols}, BLOCK = {block}"
            g, x = generator.standard_normal((2, rows, cols)).astype(np.float32)
            x += np.float32(1.5)
            w = np.ones(cols) if weights == "ones" else generator.standard_normal(cols)
            w = w.astype(np.float32)
            exact = x.astype(np.float64)
            mean, rstd = exact.mean(1), 1 / np.sqrt(exact.var(1) + EPS)
            dx = unwritten("dx", rows, cols)
            inputs = [Guarded("g", g), Guarded("x", x), Guarded("w", w)]
            statistics = [Guarded("mean", mean.astype(np.float32)), Guarded("rstd", rstd.astype(np.float32))]
            arguments = [*inputs, *statistics, dx, cols]
            launch(candidate, "layer_norm_dx_kernel", (rows,), case, arguments, outputs=[dx], BLOCK=block)
            expected = _gradient(exact, g, w)
            h = g.astype(np.float64) * w
            without = rstd[:, None] * (h - h.mean(1, keepdims=True))
            tolerance = 2e-5 * max(1.0, float(rstd.max()))
            yield compare(
                case,
                dx.numpy(),
                expected,
                tolerance=tolerance,
                mistake=partial(_mistake, rstd[:, None] * h, without, weights == "random"),
            )


def _gradient(x: np.ndarray, g: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Differentiate sum(g * layer_norm(x)) by automatic differentiation in float64."""
    leaf = torch.tensor(x, requires_grad=True)
    y = torch.nn.functional.layer_norm(leaf, leaf.shape[1:], torch.tensor(w).double(), eps=EPS)
    (gradient,) = torch.autograd.grad(y, leaf, torch.tensor(g).double())
    return gradient.numpy()


def _mistake(constant: np.ndarray, no_variance: np.ndarray, random_weights: bool, dx: np.ndarray) -> str:
    if np.allclose(dx, constant, rtol=1e-3, atol=1e-3):
        return "Mean and rstd count as constants: both correcting terms are missing"
    if np.allclose(dx, no_variance, rtol=1e-3, atol=1e-3):
        return "The term through the variance is missing"
    return "With w = 1 this was right: is g multiplied by w?" if random_weights else ""
