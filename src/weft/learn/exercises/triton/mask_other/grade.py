"""Grade maximum and sum of rows that are all negative, huge, or hold minus infinity."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.triton_launch import Guarded, launch, unwritten

WRONG = "masked lanes in the sum"
LUCKY = "masked lanes win the maximum"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    for name in ("normal", "negative", "very negative", "with -inf"):
        for rows, cols, block in ((3, 32, 32), (4, 21, 32), (2, 1, 16)):
            case = f"{name} values, {rows} x {cols}, BLOCK = {block}"
            x = _rows(name, rows, cols, generator)
            largest, total = unwritten("max", rows), unwritten("sum", rows)
            arguments = [Guarded("x", x), largest, total, cols]
            outputs = [largest, total]
            launch(candidate, "max_and_sum_kernel", (rows,), case, arguments, outputs=outputs, BLOCK=block)
            yield compare(f"max, {case}", largest.numpy(), x.max(1), mistake=_maximum_mistake)
            expected = x.astype(np.float64).sum(1)
            yield compare(f"sum, {case}", total.numpy(), expected, tolerance=1e-5, mistake=_sum_mistake)


def _rows(name: str, rows: int, cols: int, generator: np.random.Generator) -> np.ndarray:
    x = generator.standard_normal((rows, cols), dtype=np.float32)
    if name == "normal":
        x[:, 0] = np.abs(x[:, 0])
    if name == "negative":
        return -np.abs(x) - 1
    if name == "very negative":
        return (-np.abs(x) - 1) * np.float32(1e30)
    if name == "with -inf":
        x[1:] = -np.inf
    return x


def _maximum_mistake(output: np.ndarray) -> str:
    return "The masked lanes win the maximum: what is their value?" if (output == output[0]).all() else ""


def _sum_mistake(output: np.ndarray) -> str:
    spoiled = np.isinf(output).all()
    return "Minus infinity from the masked lanes in the sum: they must add 0" if spoiled else ""
