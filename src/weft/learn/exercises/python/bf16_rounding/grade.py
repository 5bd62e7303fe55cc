"""Grade the rounding of random numbers, ties, borders of the exponent and NaN against exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require
from weft.learn.probes.returned import function_returning

WRONG = "tie"
LUCKY = "NaN"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    to_bfloat16 = function_returning("an integer", candidate, "to_bfloat16")
    numbers = [int(b) for b in generator.integers(0, 1 << 32, size=500)]
    ties = [int(b) << 16 | 0x8000 for b in generator.integers(0, 1 << 16, size=300)]
    near = [tie + int(step) for tie in ties for step in (-1, 1)]
    borders = [0, 1, 0x8000, 0x80000000, 0x3FFFFFFF, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF]
    borders += [0x7F800000, 0xFF800000]
    groups = {"random numbers": numbers, "ties": ties, "beside ties": near, "borders": borders}
    for name, group in groups.items():
        finite = [bits for bits in group if bits & 0x7FFFFFFF <= 0x7F800000]
        for bits in finite:
            expected, actual = _nearest(bits), to_bfloat16(bits)
            reason = f"{bits:#010x}: expected {expected:#06x}, got {actual:#06x}"
            if bits & 0xFFFF == 0x8000:
                reason += ". A tie goes to the neighbour whose last bit is 0"
            elif actual == bits >> 16:
                reason += ". Cutting off is not rounding"
            require(actual == expected, name, reason)
        yield f"{name}: {len(finite)} values"
    nans = [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F808000]
    for bits in nans:
        actual = to_bfloat16(bits)
        require(actual == 0x7FC0, "NaN", f"{bits:#010x} is a NaN: expected 0x7fc0, got {actual:#06x}")
    yield f"NaN: {len(nans)} values"


def _nearest(bits: int) -> int:
    """Round the value, which float64 holds exactly, to 8 bits; return the upper half of its float32."""
    value = float(np.array(bits, np.uint32).view(np.float32))
    if math.isinf(value) or value == 0:
        return bits >> 16
    _, exponent = math.frexp(value)
    unit = math.ldexp(1.0, max(exponent - 8, -133))
    rounded = round(value / unit) * unit  # Python's round takes ties to even, and both products are exact
    if abs(rounded) >= 2.0**128:
        return 0xFF80 if value < 0 else 0x7F80
    upper = int(np.array(abs(rounded), np.float32).view(np.uint32)) >> 16
    return upper | (bits >> 31 << 15)
