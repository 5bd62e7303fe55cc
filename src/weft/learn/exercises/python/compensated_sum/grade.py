"""Grade sums whose terms differ in size, in both orders, on numbers that cannot leave float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require
from weft.learn.probes.returned import function_returning
from weft.learn.probes.single import Single

WRONG = "the wrong sign"
LUCKY = "needs the larger summand first"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    compensated_sum = function_returning("a float32 number", candidate, "compensated_sum")
    small = np.abs(generator.standard_normal(200)).astype(np.float32)
    large = np.float32(generator.uniform(1e8, 2e8))
    mixed = (generator.standard_normal(300) * 10.0 ** generator.integers(-4, 5, size=300)).astype(np.float32)
    lists: dict[str, Any] = {
        "equal sizes": small,
        "one value": small[:1],
        "small values after a large one": [large, *small, -large],
        "a large value after small ones": [*small, large, *small, -large],
        "mixed sizes": mixed,
        "mixed sizes that cancel": [*mixed, *-mixed[::-1], small[0]],
    }
    for name, values in lists.items():
        result = compensated_sum([Single(value) for value in values])
        exact = math.fsum(float(value) for value in values)
        size = math.fsum(abs(float(value)) for value in values)
        # One rounding of the result, and those of the losses, which are 2^-24 of the terms themselves.
        bound = 2.0**-23 * abs(exact) + len(values) * 2.0**-47 * size
        error = abs(Single.exact(result) - exact)
        reason = f"expected {exact:.8g}, got {Single.exact(result):.8g}"
        reason += f", an error of {error:.3g} where {bound:.3g} is allowed. "
        mistake = _mistake(name, values, Single.exact(result), exact, bound)
        yield require(error <= bound, name, reason + mistake)


def _mistake(name: str, values: Any, result: float, exact: float, bound: float) -> str:
    plain = np.float32(0)
    for value in values:
        plain += value
    if abs(result - float(plain)) <= abs(exact - float(plain)) / 1000:
        return "That is the plain sum in float32"
    if abs(result - float(plain) + (exact - float(plain))) <= bound:
        return "The losses have the wrong sign"
    if "large value after" in name:
        return "The short form of the loss needs the larger summand first"
    return ""
