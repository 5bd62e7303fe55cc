"""Grade softmax of rows whose maximum lies in the first, the last or any block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.triton_launch import Guarded, launch, unwritten

WRONG = "rescaled"
LUCKY = "An exponential overflows"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    for name in ("normal", "rising", "falling", "with -inf"):
        for rows, cols, block in ((2, 64, 32), (3, 77, 16), (1, 5, 16), (2, 33, 32)):
            case = f"{name} values, {rows} x {cols}, BLOCK = {block}"
            x, y = _rows(name, rows, cols, generator), unwritten("y", rows, cols)
            arguments = [Guarded("x", x), y, cols]
            launch(candidate, "online_softmax_kernel", (rows,), case, arguments, outputs=[y], BLOCK=block)
            yield compare(case, y.numpy(), _softmax(x), tolerance=2e-6, mistake=_mistake)


def _rows(name: str, rows: int, cols: int, generator: np.random.Generator) -> np.ndarray:
    x = generator.standard_normal((rows, cols), dtype=np.float32)
    slope = np.linspace(0, 500, cols, dtype=np.float32)
    if name == "with -inf":
        x[:, 1:][generator.random((rows, cols - 1)) < 0.5] = -np.inf
    return x + slope * {"rising": 1, "falling": -1}.get(name, 0)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def _mistake(y: np.ndarray) -> str:
    total = y.sum(1)
    if not np.isfinite(y).all():
        return "An exponential overflows: an element is larger than the maximum that is subtracted"
    if (total < 0.999).any():
        return "The row adds up to less than 1: is the sum rescaled when the maximum rises?"
    if (total > 1.001).any():
        return "The row adds up to more than 1: some blocks are not in the sum"
    return ""
