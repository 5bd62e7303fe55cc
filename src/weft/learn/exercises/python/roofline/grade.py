"""Grade cost and floor of three operators for several element sizes, on both sides of the balance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require
from weft.learn.probes.returned import function_returning

WRONG = "both at once"
LUCKY = "the size of an element"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    cost = function_returning("a pair of numbers", candidate, "cost")
    floor_us = function_returning("a number", candidate, "floor_us")
    limit = candidate.function("limit")
    sizes = [int(size) for size in generator.integers(1, 5000, size=6)]
    shapes = {"add": tuple(sizes[:1]), "row_sum": tuple(sizes[1:3]), "matmul": tuple(sizes[3:])}
    for operator, shape in shapes.items():
        for itemsize in (4, 2, 1):
            check = f'cost("{operator}", {shape}, {itemsize})'
            flops, elements = _count(operator, shape)
            expected, actual = (flops, elements * itemsize), tuple(cost(operator, shape, itemsize))
            reason = f"expected {expected}, got {actual}"
            if actual == (flops, elements * 4):
                reason += ". Bytes depend on the size of an element"
            elif operator == "matmul" and actual[0] * 2 == flops:
                reason += ". A product and an addition are two FLOPs"
            yield require(actual == expected, check, reason)
    for flops, nbytes in ((10**9, 10**3), (10**8, 10**9), (4 * 10**9, 4 * 10**7)):
        tflops, gb_s = float(generator.uniform(50, 1000)), float(generator.uniform(500, 4000))
        yield _floor(floor_us, limit, flops, nbytes, tflops, gb_s)
        for share in (0.99, 1.01):  # close to the balance, on both sides
            balanced = int(flops / tflops / 1e6 * gb_s * 1e3 * share)
            yield _floor(floor_us, limit, flops, balanced, tflops, gb_s)


def _count(operator: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return FLOPs and elements; the operands of a product are counted by their shapes."""
    if operator == "matmul":
        m, n, k = shape
        return 2 * m * n * k, sum(rows * cols for rows, cols in ((m, k), (k, n), (m, n)))
    results = shape[0]
    inputs = 2 * shape[0] if operator == "add" else shape[0] * shape[1]
    return (shape[0] if operator == "add" else inputs), inputs + results


def _floor(floor_us, limit, flops: int, nbytes: int, tflops: float, gb_s: float) -> str:
    check = f"floor_us({flops:g}, {nbytes:g}, {tflops:.0f}, {gb_s:.0f})"
    arithmetic, memory = flops / tflops / 1e6, nbytes / gb_s / 1e3
    expected, actual = max(arithmetic, memory), floor_us(flops, nbytes, tflops, gb_s)
    reason = f"expected {expected:.6g} us, got {actual:.6g}"
    if abs(actual - arithmetic - memory) < 1e-9 * expected:
        reason += ". A GPU computes and moves data both at once: the longer of the two times counts"
    require(abs(actual - expected) <= 1e-9 * expected, check, reason)
    name = "memory" if memory > arithmetic else "arithmetic"
    got = limit(flops, nbytes, tflops, gb_s)
    return require(got == name, check.replace("floor_us", "limit"), f'expected "{name}", got {got!r}')
