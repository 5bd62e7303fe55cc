"""Error of summation methods: the sum of n equal float32 values by five methods.

No array is needed, since all terms are one value. Source of the methods and their bounds:
Higham, "The accuracy of floating point summation", SIAM J. Sci. Comput. 14 (1993).
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

from weft.backends.numba_jit import numba

single, double = numba.float32, numba.float64


@numba.njit
def naive(value: Any, n: int) -> Any:
    total = single(0)
    for _ in range(n):
        total = single(total + value)
    return total


@numba.njit
def blocked(value: Any, n: int) -> Any:
    # Blocks of 4096 elements, each summed from 0; then the blocks' sums are added.
    # single() after each operation: numba would compute an intermediate float32 expression in float64.
    total, left = single(0), n
    while left > 0:
        take = min(left, 4096)
        block = single(0)
        for _ in range(take):
            block = single(block + value)
        total = single(total + block)
        left -= take
    return total


@numba.njit
def kahan(value: Any, n: int) -> Any:
    total = lost = single(0)
    for _ in range(n):
        # `lost` is the part of the last term that the rounding of `total` dropped.
        term = single(value - lost)
        new = single(total + term)
        lost = single(single(new - total) - term)
        total = new
    return total


@numba.njit
def in_double(value: Any, n: int) -> Any:
    total = double(0)
    for _ in range(n):
        total += double(value)
    return single(total)


@numba.njit
def added(a: Any, b: Any) -> Any:
    return single(a + b)


def pairwise(value: float, n: int) -> float:
    """Return the pairwise sum of ``n`` equal values: halves are summed separately and then added."""

    @cache
    def half(count: int) -> float:
        # Both halves are equal if count is even, and the cache makes the recursion logarithmic in n.
        if count == 1:
            return value
        return float(added(single(half(count // 2)), single(half(count - count // 2))))

    return half(n)


METHODS = {
    "one float32 running sum": naive,
    "blocks of 4096, each in float32": blocked,
    "pairwise in float32": pairwise,
    "Kahan's compensated float32": kahan,
    "one double running sum, rounded once": in_double,
}


def errors(n: int = 10**8, value: float = 0.1) -> dict[str, tuple[float, float]]:
    """Return, for each method, the sum of n times float32(value) and its relative error."""
    term = single(value)
    # Exact rational arithmetic: a float64 reference would have an error near that of the last method.
    exact = Fraction(float(term)) * n
    sums = {name: float(method(term, n)) for name, method in METHODS.items()}
    return {k: (got, float(abs(Fraction(got) - exact) / exact)) for k, got in sums.items()}


def table() -> str:
    """Return the errors as a Markdown table, for the README."""
    lines = ["| method | 1e8 times float32(0.1) | relative error |", "|---|---|---|"]
    lines += [f"| {k} | {got:.1f} | {error:.1e} |" for k, (got, error) in errors().items()]
    return "\n".join(lines) + "\n"
