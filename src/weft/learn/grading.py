"""Functions of a grade module: compare an output with the expected one, and refuse with one clear reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np


class Refused(Exception):
    """Raised by a grade module for the first check that a solution does not pass.

    ``reason`` says which input, which element, what was expected and got, and the likely mistake.
    """

    def __init__(self, check: str, reason: str) -> None:
        self.check, self.reason = check, reason
        super().__init__(f"{check}: {reason}")


def require(condition: bool, check: str, reason: str) -> str:
    """Return the name of the check; raise :class:`Refused` if the condition is false."""
    if not condition:
        raise Refused(check, reason)
    return check


def compare(
    check: str,
    output: Any,
    expected: np.ndarray,
    *,
    tolerance: float = 0.0,
    mistake: Callable[[np.ndarray], str] | None = None,
) -> str:
    """Return the name of the check if ``output`` equals ``expected``; raise :class:`Refused` otherwise.

    ``tolerance`` is the largest difference, relative to the larger of 1 and the expected value; 0 asks for
    equality. NaN equals NaN. ``mistake(output)`` may name the likely mistake; "" means that it knows none.
    """
    actual = np.asarray(output)
    if actual.shape != expected.shape:
        raise Refused(check, f"expected the shape {expected.shape}, got {actual.shape}")
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
        # An infinite expected value allows no other one: its limit must not be infinite too.
        size = np.abs(np.where(np.isfinite(expected), expected, 0.0).astype(np.float64))
        limit = tolerance * np.maximum(1.0, size)
        equal = (difference <= limit) | (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    if equal.all():
        return check
    wrong = np.argwhere(~equal)
    index = tuple(int(i) for i in wrong[0])
    where = "the result" if not index else f"element {index[0] if len(index) == 1 else index}"
    reason = f"{where}: expected {number(expected[index])}, got {number(actual[index])}"
    if len(wrong) > 1:
        reason += f" ({len(wrong)} of {expected.size} elements differ)"
    if mistake is not None and (likely := mistake(actual)):
        reason += f". {likely}"
    raise Refused(check, reason)


def number(value: Any) -> str:
    """Format a value of an array for a reason.

    >>> number(np.float32(0.1)), number(np.int32(7)), number(float("nan"))
    ('0.1', '7', 'nan')
    """
    if isinstance(value, float | np.floating) and math.isfinite(value):
        return f"{float(value):.6g}"
    return str(value)


def odd_sizes(generator: np.random.Generator, *, low: int, high: int, count: int = 3) -> list[int]:
    """Return ``count`` odd sizes from about ``low`` to ``high``, in random order."""
    sizes = generator.integers(low // 2, high // 2, size=count) * 2 + 1
    return [int(size) for size in sizes]
