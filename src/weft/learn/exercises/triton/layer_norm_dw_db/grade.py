"""Grade each program's partial sums and the finished sums, also where the last program has few rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.triton_launch import Guarded, launch, unwritten

WRONG = "row of its own"
LUCKY = "the load needs a mask"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    for rows, cols, per_program, block in ((8, 16, 4, 16), (7, 13, 3, 16), (1, 1, 4, 16), (21, 30, 5, 32)):
        case = f"{rows} x {cols}, R = {per_program}, BLOCK = {block}"
        g, x = generator.standard_normal((2, rows, cols)).astype(np.float32)
        mean, rstd = x.mean(1) + np.float32(0.1), 1 / (x.std(1) + np.float32(0.5))
        programs = -(-rows // per_program)
        parts = [unwritten("dw_part", programs, cols), unwritten("db_part", programs, cols)]
        statistics = [Guarded("mean", mean), Guarded("rstd", rstd)]
        arguments = [Guarded("g", g), Guarded("x", x), *statistics, *parts, rows, cols]
        constants = {"R": per_program, "BLOCK": block}
        launch(candidate, "partial_kernel", (programs,), case, arguments, outputs=parts, **constants)
        wide = g.astype(np.float64)
        terms = wide * (x.astype(np.float64) - mean[:, None]) * rstd[:, None], wide
        for name, part, term in zip(("dw", "db"), parts, terms, strict=True):
            starts = range(0, rows, per_program)
            expected = np.stack([term[start : start + per_program].sum(0) for start in starts])
            check = f"{name}_part, {case}"
            yield compare(check, part.numpy(), expected, tolerance=1e-5, mistake=_mistake)
            out = unwritten(name, cols)
            finish = [part, out, programs, cols]
            launch(candidate, "finish_kernel", (1,), case, finish, outputs=[out, part], BLOCK=block)
            yield compare(f"{name}, {case}", out.numpy(), term.sum(0), tolerance=2e-5)


def _mistake(part: Any) -> str:
    missing = np.isnan(part)
    if missing[-1].all() and not missing[:-1].any() and len(part) > 1:
        return "The last program has fewer rows, and it read rows behind the end"
    if missing.all():
        return "The sums were not stored: each program stores to a row of its own, at pid * n_cols"
    return ""
