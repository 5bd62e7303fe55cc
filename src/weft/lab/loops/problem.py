"""Data of a program of the loop study, its float64 result, and the check of a variant before it is timed.

A variant is checked twice, at the size at which it is timed. On small whole numbers every partial result is
exact in float32, in whatever order it is added up, so a variant must return the exact result: one element
that is missing or counted twice shows. On normal numbers its error may be at most gamma(n) times the same
program on absolute values. Here gamma(n) = n u / (1 - n u), u = 2^-24 is half of float32's epsilon, and n is
the number of roundings on the longest path: k for a product, 4 for each of the two sweeps, n for a sum. The
bound holds for every order of the additions, with or without fused multiply-add (Higham 2002, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from weft.lab.loops.variants import PROGRAMS, Variant

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
UNIT_ROUNDOFF = float(np.finfo(np.float32).eps) / 2
ALIGNMENT = 64  # bytes, a cache line: rows begin where the simulation has them
INTEGERS, NORMAL = "integers", "normal"
CONTENTS = (INTEGERS, NORMAL)
SWEEP_ROUNDINGS = 4  # three additions of neighbours, one of the middle; the factors are powers of two
RING_ROWS = 3  # of the fused stencil's rows between its sweeps


@dataclass(frozen=True)
class Verdict:
    """Outcome of a check. ``share`` is the largest error on normal numbers as a share of its bound.

    ``reason`` says why the variant is wrong; empty if it is right. ``seconds`` is the time of its last call.
    """

    share: float
    reason: str = ""
    seconds: float = 0.0


def gamma(count: int) -> float:
    """Return the bound of the relative error of ``count`` roundings in a row."""
    return count * UNIT_ROUNDOFF / (1 - count * UNIT_ROUNDOFF)


def aligned(*shape: int) -> Floats:
    """Return an uninitialised float32 array whose first element begins a cache line."""
    count = int(np.prod(shape))
    memory = np.empty(4 * count + ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + 4 * count].view(np.float32).reshape(shape)


class Problem:
    """Arrays of a program at a size. All its variants share them, except the fused stencil's rows."""

    def __init__(self, program: str, size: int) -> None:
        self.program, self.shape = program, PROGRAMS[program].shape(size)
        self._ring: Floats | None = None
        self.inputs: tuple[Floats, ...]
        self.between: Floats | None = None
        if program == "product":
            m, n, k = self.shape
            self.inputs, self.output = (aligned(m, k), aligned(k, n)), aligned(m, n)
        elif program == "stencil":
            self.inputs, self.between = (aligned(*self.shape),), aligned(*self.shape)
            self.output = aligned(*self.shape)
            self._ring = aligned(RING_ROWS, self.shape[1])
        else:
            self.inputs, self.output = (aligned(*self.shape),), aligned(1)
        self._references: dict[str, tuple[Doubles, Doubles]] = {}

    def arrays(self, variant: Variant) -> tuple[Floats, ...]:
        """Return the arguments of a variant: inputs, what lies between the sweeps, and the output."""
        if self.program != "stencil":
            return (*self.inputs, self.output)
        between = self._ring if variant.name == "fusion" else self.between
        assert between is not None
        return (*self.inputs, between, self.output)

    def fill(self, contents: str) -> None:
        """Write the inputs, the same ones for the same contents; poison everything that a call writes."""
        rng = np.random.default_rng(0)
        for array in self.inputs:
            if contents == NORMAL:
                array[...] = rng.standard_normal(array.shape, dtype=np.float32)
            else:
                # Without 0, so that no product or summand can be missing without a trace. Sums of so many of
                # them stay far below 2^24, up to which float32 has every whole number.
                array[...] = rng.integers(1, 5, array.shape) * rng.choice((-1, 1), array.shape)
        for target in (self.between, self._ring, self.output):
            if target is not None:
                target.fill(np.nan)
        if self.program == "stencil":
            (x,) = self.inputs
            for target in (self.between, self.output):
                assert target is not None
                target[[0, -1]] = x[[0, -1]]
                target[:, [0, -1]] = x[:, [0, -1]]

    def reference(self, contents: str) -> tuple[Doubles, Doubles]:
        """Return the float64 result on these contents, which must be filled in, and the error allowed."""
        if contents not in self._references:
            inputs = [array.astype(np.float64) for array in self.inputs]
            exact = self._compute(inputs)
            roundings = {"product": self.shape[-1], "stencil": 2 * SWEEP_ROUNDINGS, "sum": self.shape[0]}
            bound = gamma(roundings[self.program]) * self._compute([np.abs(x) for x in inputs])
            self._references[contents] = exact, bound
        return self._references[contents]

    def _compute(self, inputs: Sequence[Doubles]) -> Doubles:
        if self.program == "product":
            return np.asarray(inputs[0] @ inputs[1])
        return swept(swept(inputs[0])) if self.program == "stencil" else np.array([inputs[0].sum()])

    def compare(self, contents: str) -> Verdict:
        """Compare the output of the last call with the float64 result on these contents."""
        exact, bound = self.reference(contents)
        # NaN, the poison, is an infinite error.
        error = np.nan_to_num(np.abs(self.output - exact), nan=np.inf, posinf=np.inf)
        if contents == INTEGERS:
            wrong, share = error > 0, 0.0
        else:
            # An element whose bound is 0 has no error either: its share is 0, or infinite.
            shares = np.divide(error, bound, out=np.where(error > 0, np.inf, 0.0), where=bound > 0)
            wrong, share = error > bound, float(shares.max())
        if not wrong.any():
            return Verdict(share)
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        reason = (
            f"{int(wrong.sum())} of {wrong.size} elements are wrong on {contents}: {list(first)} is "
            f"{self.output[first]:.9g}, and float64 has {exact[first]:.9g}"
        )
        return Verdict(share, reason)

    def check(self, call: Callable[[], None]) -> Verdict:
        """Check a call on both contents, over poisoned memory; the inputs must stay as they are."""
        verdict = Verdict(0.0)
        for contents in CONTENTS:
            self.fill(contents)
            before = [array.copy() for array in self.inputs]
            start = perf_counter()
            call()
            seconds = perf_counter() - start
            if not all(map(np.array_equal, before, self.inputs)):
                return Verdict(0.0, f"changes its inputs on {contents}")
            verdict = replace(self.compare(contents), seconds=seconds)
            if verdict.reason:
                return verdict
        return verdict


def swept(x: Doubles) -> Doubles:
    """Return one sweep of the stencil over a grid; its edges stay."""
    y = x.copy()
    neighbours = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]
    y[1:-1, 1:-1] = 0.5 * x[1:-1, 1:-1] + 0.125 * neighbours
    return y
