"""Grade softmax of rows with small, huge and offset values, with gaps between the rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.triton_launch import Guarded, launch, unwritten

WRONG = "adds exp(0 - m)"
LUCKY = "overflow"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    values = (("standard", 1.0, 0.0), ("huge", 1e30, 0.0), ("offset", 1.0, 1000.0), ("offset", 1.0, -1000.0))
    for name, scale, offset in values:
        for rows, cols, gap, block in ((2, 32, 0, 32), (5, 19, 3, 32), (1, 1, 0, 16), (3, 70, 1, 128)):
            case = f"{name} values, {rows} x {cols}, BLOCK = {block}"
            memory = generator.standard_normal((rows, cols + gap), dtype=np.float32) * scale + offset
            memory = memory.astype(np.float32)
            if cols > 1:
                memory[0, 1] = -np.inf
            x, y = Guarded("x", memory), unwritten("y", rows, cols)
            arguments = [x, y, cols, cols + gap, cols]
            launch(candidate, "softmax_kernel", (rows,), case, arguments, outputs=[y], BLOCK=block)
            yield compare(case, y.numpy(), _softmax(memory[:, :cols]), tolerance=1e-6, mistake=_mistake)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def _mistake(y: np.ndarray) -> str:
    if np.isnan(y).any() or (y.sum(1) == 0).any():
        return "An overflow of exp gives inf / inf = NaN, an underflow 0 / 0: subtract the maximum first"
    if (y >= 0).all() and (y.sum(1) < 0.999).any():
        return "The row adds up to less than 1: a masked lane of 0 adds exp(0 - m) to the sum"
    return ""
