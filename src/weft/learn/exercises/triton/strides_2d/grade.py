"""Grade the kernel on contiguous matrices, slices and transposes, as input and as output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare, require
from weft.learn.probes.triton_launch import Guarded, GuardedView, launch, unwritten

WRONG = "which is not n_cols"
LUCKY = "of a transpose is not 1"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    for rows, cols in ((8, 16), (13, 21)):
        for name, memory_shape, view in _views(rows, cols):
            values = generator.standard_normal(memory_shape, dtype=np.float32)
            yield _doubled(candidate, f"x is {name}", values, view, (rows, cols), lambda t: t)
        values = generator.standard_normal((rows, cols), dtype=np.float32)
        for name, memory_shape, view in _views(rows, cols):
            yield _doubled(candidate, f"out is {name}", values, lambda t: t, memory_shape, view)


View = Callable[[Any], Any]


def _views(rows: int, cols: int) -> Iterator[tuple[str, tuple[int, int], View]]:
    """Yield name, shape of the memory and the view of it that has the shape (rows, cols)."""
    yield "contiguous", (rows, cols), lambda t: t
    yield "a slice of columns", (rows, cols + 5), lambda t: t[:, 2 : 2 + cols]
    yield "a transpose", (cols, rows), lambda t: t.T
    yield "every second column", (rows, 2 * cols), lambda t: t[:, ::2]


def _doubled(candidate: Candidate, name: str, values: Any, view: View, out_shape: Any, out_view: View) -> str:
    x, out = Guarded("x", values), unwritten("out", *out_shape)
    x_matrix, out_matrix = view(x.tensor), out_view(out.tensor)
    rows, cols = x_matrix.shape
    case = f"{name}, {rows} x {cols}"
    grid = (-(-rows // 8), -(-cols // 16))
    views = [GuardedView(x, x_matrix), GuardedView(out, out_matrix)]
    arguments = [*views, rows, cols, *x_matrix.stride(), *out_matrix.stride()]
    launch(candidate, "double_kernel", grid, case, arguments, outputs=[out], BLOCK_R=8, BLOCK_C=16)
    outside = int(np.isfinite(out.numpy()).sum()) - int(np.isfinite(out_matrix.numpy()).sum())
    require(outside == 0, case, f"{outside} elements beside the view of out were written")
    mistake = {
        "slice": "A slice keeps the row stride of the whole matrix, which is not n_cols",
        "transpose": "The column stride of a transpose is not 1",
        "second": "The column stride of every second column is 2",
    }
    likely = next((text for word, text in mistake.items() if word in name), "")
    return compare(case, out_matrix.numpy(), 2 * view(values), mistake=lambda _: likely)
