"""Grade attention at ragged numbers of queries and keys and at large scores, and the bytes stored."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import compare, odd_sizes, require

WRONG = "is the output so far rescaled"
LUCKY = "is the maximum subtracted"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    program = Program(
        candidate,
        "void run(const float* q, const float* k, const float* v, float* out, int queries, int keys)",
    )
    odd = odd_sizes(generator, low=33, high=100, count=2)
    for queries, keys, size in ((64, 64, 1.0), (odd[0], odd[1], 1.0), (3, 1, 1.0), (20, 70, 12.0)):
        check = f"{queries} queries, {keys} keys, elements of size {size:g}"
        q, k, v = (generator.standard_normal((n, 32), dtype=np.float32) for n in (queries, keys, keys))
        q, k = q * np.float32(size), k * np.float32(size)
        out = program.empty("out", (queries, 32))
        arrays = [program.array(name, array) for name, array in (("q", q), ("k", k), ("v", v))]
        counts = program.call("run", *arrays, out, queries, keys, case=check)
        scores = q.astype(np.float64) @ k.T.astype(np.float64) / np.sqrt(32)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)

        def mistake(output: np.ndarray) -> str:
            if not np.isfinite(output).all():
                return "exp overflows: is the maximum subtracted?"
            return "With a new maximum, is the output so far rescaled, as the sum of weights is?"

        yield compare(check, out.read(), weights @ v, tolerance=1e-3, mistake=mistake)
        yield require(
            counts.store_bytes <= 4 * queries * 32,
            f"{check}: stores",
            f"{counts.store_bytes} bytes were stored in global memory, and the output has {4 * queries * 32}",
        )
