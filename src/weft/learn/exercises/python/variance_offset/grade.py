"""Grade the variance of streams far from 0, and of one whose first value is an outlier."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require
from weft.learn.probes.returned import function_returning
from weft.learn.probes.single import Single

WRONG = "Two large numbers cancel"
LUCKY = "if that is an outlier"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    variance = function_returning("a float32 number", candidate, "variance")
    spread = generator.standard_normal(6000)
    streams = {
        "around 0": spread[:1000],
        "one value": spread[:1] + 5,
        "around 10 000": spread[:1000] + 10_000,
        "around -30 000": spread[:1000] * 20 - 30_000,
        **{
            f"around {offset:g} after a first value of 0": np.concatenate([[0.0], spread + offset])
            for offset in generator.uniform(1e4, 1e5, size=3)
        },
    }
    for name, numbers in streams.items():
        values = numbers.astype(np.float32)
        exact = float(np.var(values.astype(np.float64)))
        result = Single.exact(variance(iter([Single(value) for value in values])))
        reason = f"expected {exact:.6g}, got {result:.6g}"
        if "first value" in name:
            reason += ". To subtract the first value does not help if that is an outlier"
        elif "around" in name and name != "around 0":
            reason += ". Two large numbers cancel: subtract a mean before you square"
        yield require(abs(result - exact) <= 1e-3 * exact + 1e-12, name, reason)
