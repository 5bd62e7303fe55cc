"""Grade attention for equal and different blocks, odd lengths, and scores of large spread."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import compare
from weft.learn.probes.triton_launch import Guarded, launch, unwritten

WRONG = "must rescale acc"
LUCKY = "BQ and BK differ here"


SHAPES = ((32, 16, 16, 16), (39, 16, 16, 16), (45, 16, 32, 16), (45, 32, 16, 32), (1, 16, 16, 16))


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    for spread in (1.0, 8.0):
        for t, d, bq, bk in SHAPES:
            case = f"scores of spread {spread:g}, T = {t}, D = {d}, BQ = {bq}, BK = {bk}"
            q, k, v = generator.standard_normal((3, t, d)).astype(np.float32)
            q *= np.float32(spread)
            o, scale = unwritten("O", t, d), d**-0.5
            arguments = [Guarded("Q", q), Guarded("K", k), Guarded("V", v), o, t, scale]
            blocks = {"D": d, "BQ": bq, "BK": bk}
            launch(candidate, "attention_kernel", (-(-t // bq),), case, arguments, outputs=[o], **blocks)
            expected = _attention(q, k, v, scale)
            yield compare(
                case,
                o.numpy(),
                expected,
                tolerance=2e-5,
                mistake=partial(_mistake, expected, bq, bk),
            )


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    scores = q.astype(np.float64) @ k.astype(np.float64).T * scale
    scores[np.triu_indices(len(q), 1)] = -np.inf
    p = np.exp(scores - scores.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ v.astype(np.float64)


def _mistake(exact: np.ndarray, bq: int, bk: int, o: np.ndarray) -> str:
    right = (np.abs(o - exact) < 1e-3).all(1)
    if not right[0]:
        first = "The output of query 0 is v[0], since it sees one key only"
        return first if bq == bk else f"{first}. BQ and BK differ here: compare positions of keys and queries"
    if right[:bk].all():
        return "Queries that see one block of keys are right: later blocks must rescale acc as well as s"
    return ""
