"""Functions of a grade module: compare an output with the expected one, and refuse with one clear reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

UNSET_BYTE = b"\xfe"  # of a local variable without a first value: see cuda_program.UNSET_LOCALS
UNSET_FLOAT = abs(float(np.frombuffer(UNSET_BYTE * 4, np.float32)[0]))
UNSET_INT = abs(int(np.frombuffer(UNSET_BYTE * 4, np.int32)[0]))


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
    if _is_unset(actual[index], expected[index]):
        raise Refused(check, f"{reason}. Does a variable start without a value, and not as float sum = 0?")
    if mistake is not None and (likely := mistake(actual)):
        reason += f". {likely}"
    elif (
        actual.any()
        and np.isfinite(actual).all()
        and (actual == np.trunc(actual)).all()
        and (expected != np.trunc(expected)).any()
    ):
        reason += ". All results are whole numbers: is a variable an int that should be a float?"
    raise Refused(check, reason)


def _are_whole(values: np.ndarray) -> bool:
    return bool((np.isfinite(values) & (values == np.trunc(values))).all())


def _is_unset(value: Any, expected: Any) -> bool:
    """Return whether a wrong value is about what a local variable without a first value holds."""
    size = abs(float(value) - float(expected))
    return any(0.99 * unset < size < 1.01 * unset for unset in (UNSET_FLOAT, UNSET_INT))


def number(value: Any) -> str:
    """Format a value of an array for a reason.

    >>> number(np.float32(0.1)), number(np.int32(7)), number(float("nan"))
    ('0.1', '7', 'nan')
    """
    if isinstance(value, float | np.floating) and math.isfinite(value):
        return f"{float(value):.6g}"
    return str(value)


def quarters(generator: np.random.Generator, low: int, high: int, shape: int | tuple[int, ...]) -> np.ndarray:
    """Return random multiples of 1/4 from ``low`` to ``high`` (inclusive), as float32.

    Their sums and products are exact in any order, and an int in a learner's code loses their fractions.
    """
    return (generator.integers(4 * low, 4 * high + 1, size=shape) / 4).astype(np.float32)


def odd_sizes(generator: np.random.Generator, *, low: int, high: int, count: int = 3) -> list[int]:
    """Return ``count`` odd sizes from about ``low`` to ``high``, in random order."""
    sizes = generator.integers(low // 2, high // 2, size=count) * 2 + 1
    return [int(size) for size in sizes]
