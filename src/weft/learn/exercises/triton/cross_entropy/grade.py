"""Grade loss and gradient with logits of spread 1 and 100, first and last targets included."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.triton_launch import Guarded, launch, unwritten

WRONG = "add up to 0"
LUCKY = "spread 100"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    for spread in (1.0, 100.0):
        for rows, cols, block in ((4, 32, 32), (5, 21, 32), (1, 1, 16), (3, 200, 256)):
            case = f"logits of spread {spread:g}, {rows} x {cols}, BLOCK = {block}"
            x = (generator.standard_normal((rows, cols)) * spread).astype(np.float32)
            targets = generator.integers(0, cols, rows)
            targets[0] = cols - 1
            targets[rows // 2] = x[rows // 2].argmin()
            logits, loss = Guarded("x", x), unwritten("loss", rows)
            arguments = [logits, Guarded("target", targets), loss, cols]
            outputs = [logits, loss]
            launch(candidate, "cross_entropy_kernel", (rows,), case, arguments, outputs=outputs, BLOCK=block)
            expected, gradient = _reference(x.astype(np.float64), targets)
            yield compare(f"loss, {case}", loss.numpy(), expected, tolerance=3e-6, mistake=_loss_mistake)
            check = f"gradient, {case}"
            yield compare(check, logits.numpy(), gradient, tolerance=3e-6, mistake=_gradient_mistake)


def _reference(x: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, m = np.arange(len(x)), x.max(1)
    e = np.exp(x - m[:, None])
    gradient = e / e.sum(1, keepdims=True)
    gradient[rows, targets] -= 1
    return m + np.log(e.sum(1)) - x[rows, targets], gradient


def _loss_mistake(loss: np.ndarray) -> str:
    infinite = np.isinf(loss).any()
    return "The probability of a target is 0 in float32: take no logarithm of it" if infinite else ""


def _gradient_mistake(gradient: np.ndarray) -> str:
    if np.allclose(gradient.sum(1), 1, atol=1e-4):
        return "A gradient's elements add up to 0, and these add up to 1: subtract 1 at the target"
    return ""
