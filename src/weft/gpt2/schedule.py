"""The learning rate over a run: a straight warm-up, then half a cosine down to a floor."""

from __future__ import annotations

import math


def cosine(step: int, *, steps: int, lr: float, warmup: int, floor: float) -> float:
    """The rate of the step after ``step`` finished ones, of ``steps``.

    It rises to ``lr`` over ``warmup`` steps, of which none has a rate of 0, and falls as a cosine
    to ``floor`` times ``lr`` at the last step (arXiv:1608.03983, without restarts).

    >>> [round(cosine(s, steps=6, lr=1.0, warmup=2, floor=0.1), 3) for s in range(6)]
    [0.5, 1.0, 1.0, 0.775, 0.325, 0.1]
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    way = (step - warmup) / max(1, steps - 1 - warmup)
    return lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, way))))
