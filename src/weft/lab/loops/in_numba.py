"""Loop nests of the study in numba: the variants of programs.c, in the same order of accesses.

Every function is plain Python over two-dimensional float32 arrays. :func:`compiled` compiles it, and the
tests run it as Python over arrays that record each access. The arguments of a program are those of programs.c
without sizes, which arrays have.

LLVM vectorises numba's inner loops by itself where that does not change the result, and numba has no option
for one function to forbid it. So ``vectorisation`` is a variant of its own only for the sum, whose additions
LLVM may not reorder without ``fastmath``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from weft.backends.numba_jit import numba
from weft.lab.loops.variants import STRIP, TILE, Variant

ZERO, EIGHTH, HALF = np.float32(0), np.float32(0.125), np.float32(0.5)
MATRIX = "float32[:, ::1]"
SIGNATURES = {
    "product": f"void({MATRIX}, {MATRIX}, {MATRIX}, int64)",
    "stencil": f"void({MATRIX}, {MATRIX}, {MATRIX}, int64)",
    "sum": "void(float32[::1], float32[::1], int64)",
}
# Arithmetic on several floats at once: x86 (vaddps, vfmadd231ps) and Arm (fmla v0.4s).
PACKED = re.compile(r"\bv?(?:add|mul|fn?madd\d*)ps\b|\bf(?:add|mul|mla)\s+v\d+\.4s")
Array = Any  # a float32 array; in the tests one that records each access

# Product


def product_naive(a: Array, b: Array, c: Array, threads: int) -> None:
    for i in range(c.shape[0]):
        for j in range(c.shape[1]):
            total = ZERO
            for p in range(a.shape[1]):
                total += a[i, p] * b[p, j]
            c[i, j] = total


def product_interchange(a: Array, b: Array, c: Array, threads: int) -> None:
    for i in range(c.shape[0]):
        for j in range(c.shape[1]):
            c[i, j] = ZERO
        for p in range(a.shape[1]):
            factor = a[i, p]
            for j in range(c.shape[1]):
                c[i, j] += factor * b[p, j]


def product_tiling(a: Array, b: Array, c: Array, threads: int) -> None:
    for i in range(c.shape[0]):
        for j in range(c.shape[1]):
            c[i, j] = ZERO
    for jj in range(0, c.shape[1], TILE):
        for pp in range(0, a.shape[1], TILE):
            p_end, j_end = min(pp + TILE, a.shape[1]), min(jj + TILE, c.shape[1])
            for i in range(c.shape[0]):
                # A view, so that the inner index begins at 0: numba adds the length to a negative index, and
                # LLVM vectorises only where it can prove that there is none.
                c_part = c[i, jj:j_end]
                for p in range(pp, p_end):
                    factor, b_part = a[i, p], b[p, jj:j_end]
                    for j in range(j_end - jj):
                        c_part[j] += factor * b_part[j]


def product_unrolling(a: Array, b: Array, c: Array, threads: int) -> None:
    whole = c.shape[1] // 4 * 4
    for i in range(c.shape[0]):
        for j in range(c.shape[1]):
            c[i, j] = ZERO
        for p in range(a.shape[1]):
            factor = a[i, p]
            for j in range(0, whole, 4):
                c[i, j] += factor * b[p, j]
                c[i, j + 1] += factor * b[p, j + 1]
                c[i, j + 2] += factor * b[p, j + 2]
                c[i, j + 3] += factor * b[p, j + 3]
            for j in range(whole, c.shape[1]):
                c[i, j] += factor * b[p, j]


def product_unroll_and_jam(a: Array, b: Array, c: Array, threads: int) -> None:
    whole = a.shape[1] // 4 * 4
    for i in range(c.shape[0]):
        for j in range(c.shape[1]):
            c[i, j] = ZERO
        for p in range(0, whole, 4):
            f0, f1, f2, f3 = a[i, p], a[i, p + 1], a[i, p + 2], a[i, p + 3]
            # c is loaded and stored once for four multiply-adds.
            for j in range(c.shape[1]):
                c[i, j] += f0 * b[p, j] + f1 * b[p + 1, j] + f2 * b[p + 2, j] + f3 * b[p + 3, j]
        for p in range(whole, a.shape[1]):
            factor = a[i, p]
            for j in range(c.shape[1]):
                c[i, j] += factor * b[p, j]


def product_parallelisation(a: Array, b: Array, c: Array, threads: int) -> None:
    for i in numba.prange(c.shape[0]):
        for j in range(c.shape[1]):
            c[i, j] = ZERO
        for p in range(a.shape[1]):
            factor = a[i, p]
            for j in range(c.shape[1]):
                c[i, j] += factor * b[p, j]


# Stencil. Two sweeps, written in full: a function that both call would be compiled before each of them.


def stencil_naive(x: Array, t: Array, y: Array, threads: int) -> None:
    rows, columns = x.shape
    for j in range(1, columns - 1):
        for i in range(1, rows - 1):
            t[i, j] = HALF * x[i, j] + EIGHTH * (x[i - 1, j] + x[i + 1, j] + x[i, j - 1] + x[i, j + 1])
    for j in range(1, columns - 1):
        for i in range(1, rows - 1):
            y[i, j] = HALF * t[i, j] + EIGHTH * (t[i - 1, j] + t[i + 1, j] + t[i, j - 1] + t[i, j + 1])


def stencil_interchange(x: Array, t: Array, y: Array, threads: int) -> None:
    rows, columns = x.shape
    for i in range(1, rows - 1):
        for j in range(1, columns - 1):
            t[i, j] = HALF * x[i, j] + EIGHTH * (x[i - 1, j] + x[i + 1, j] + x[i, j - 1] + x[i, j + 1])
    for i in range(1, rows - 1):
        for j in range(1, columns - 1):
            y[i, j] = HALF * t[i, j] + EIGHTH * (t[i - 1, j] + t[i + 1, j] + t[i, j - 1] + t[i, j + 1])


def stencil_tiling(x: Array, t: Array, y: Array, threads: int) -> None:
    rows, columns = x.shape
    for jj in range(1, columns - 1, STRIP):
        j_end = min(jj + STRIP, columns - 1)
        for i in range(1, rows - 1):
            at, above, below = x[i, jj - 1 : j_end + 1], x[i - 1, jj:j_end], x[i + 1, jj:j_end]
            out = t[i, jj:j_end]
            for j in range(j_end - jj):
                out[j] = HALF * at[j + 1] + EIGHTH * (above[j] + below[j] + at[j] + at[j + 2])
    for jj in range(1, columns - 1, STRIP):
        j_end = min(jj + STRIP, columns - 1)
        for i in range(1, rows - 1):
            at, above, below = t[i, jj - 1 : j_end + 1], t[i - 1, jj:j_end], t[i + 1, jj:j_end]
            out = y[i, jj:j_end]
            for j in range(j_end - jj):
                out[j] = HALF * at[j + 1] + EIGHTH * (above[j] + below[j] + at[j] + at[j + 2])


def stencil_fusion(x: Array, t: Array, y: Array, threads: int) -> None:
    """Run both sweeps in one; t has three rows, of which row ``i % 3`` holds row i of the first sweep."""
    rows, columns = x.shape
    for j in range(columns):
        t[0, j] = x[0, j]
    for i in range(1, rows):
        row = i % 3
        if i < rows - 1:
            t[row, 0] = x[i, 0]
            for j in range(1, columns - 1):
                t[row, j] = HALF * x[i, j] + EIGHTH * (x[i - 1, j] + x[i + 1, j] + x[i, j - 1] + x[i, j + 1])
            t[row, columns - 1] = x[i, columns - 1]
        else:
            for j in range(columns):
                t[row, j] = x[i, j]
        if i >= 2:
            above, middle = (i - 2) % 3, (i - 1) % 3
            for j in range(1, columns - 1):
                y[i - 1, j] = HALF * t[middle, j] + EIGHTH * (
                    t[above, j] + t[row, j] + t[middle, j - 1] + t[middle, j + 1]
                )


def stencil_fission(x: Array, t: Array, y: Array, threads: int) -> None:
    rows, columns = x.shape
    for i in range(1, rows - 1):
        for j in range(1, columns - 1):
            t[i, j] = HALF * x[i, j] + EIGHTH * (x[i, j - 1] + x[i, j + 1])
    for i in range(1, rows - 1):
        for j in range(1, columns - 1):
            t[i, j] += EIGHTH * (x[i - 1, j] + x[i + 1, j])
    for i in range(1, rows - 1):
        for j in range(1, columns - 1):
            y[i, j] = HALF * t[i, j] + EIGHTH * (t[i, j - 1] + t[i, j + 1])
    for i in range(1, rows - 1):
        for j in range(1, columns - 1):
            y[i, j] += EIGHTH * (t[i - 1, j] + t[i + 1, j])


def stencil_parallelisation(x: Array, t: Array, y: Array, threads: int) -> None:
    rows, columns = x.shape
    for i in numba.prange(1, rows - 1):
        for j in range(1, columns - 1):
            t[i, j] = HALF * x[i, j] + EIGHTH * (x[i - 1, j] + x[i + 1, j] + x[i, j - 1] + x[i, j + 1])
    # The end of a prange waits for all threads: the second sweep reads its neighbours' rows.
    for i in numba.prange(1, rows - 1):
        for j in range(1, columns - 1):
            y[i, j] = HALF * t[i, j] + EIGHTH * (t[i - 1, j] + t[i + 1, j] + t[i, j - 1] + t[i, j + 1])


# Sum


def sum_naive(x: Array, out: Array, threads: int) -> None:
    total = ZERO
    for i in range(x.shape[0]):
        total += x[i]
    out[0] = total


def sum_unrolling(x: Array, out: Array, threads: int) -> None:
    s0, s1, s2, s3 = ZERO, ZERO, ZERO, ZERO
    whole = x.shape[0] // 4 * 4
    for i in range(0, whole, 4):
        s0 += x[i]
        s1 += x[i + 1]
        s2 += x[i + 2]
        s3 += x[i + 3]
    for i in range(whole, x.shape[0]):
        s0 += x[i]
    out[0] = (s0 + s1) + (s2 + s3)


def sum_vectorisation(x: Array, out: Array, threads: int) -> None:
    total = ZERO
    for i in range(x.shape[0]):
        total += x[i]
    out[0] = total


def sum_parallelisation(x: Array, out: Array, threads: int) -> None:
    n = x.shape[0]
    sums = np.zeros(threads, dtype=np.float32)
    for thread in numba.prange(threads):
        total = ZERO
        for i in range(n * thread // threads, n * (thread + 1) // threads):
            total += x[i]
        sums[thread] = total
    total = ZERO
    for thread in range(threads):
        total += sums[thread]
    out[0] = total


# Options of njit beside the signature. "reassoc" lets LLVM divide one sum among the lanes of a register.
OPTIONS: Mapping[str, dict[str, Any]] = {
    "product_parallelisation": {"parallel": True},
    "stencil_parallelisation": {"parallel": True},
    "sum_parallelisation": {"parallel": True},
    "sum_vectorisation": {"fastmath": {"reassoc", "nsz"}},
}


def source(variant: Variant) -> Callable[..., None] | None:
    """Return a variant as plain Python; None if it is not written in numba."""
    function: Callable[..., None] | None = globals().get(variant.function)
    return function


def compiled(variant: Variant, threads: int) -> Callable[..., None]:
    """Compile a variant that has a :func:`source`; its loops over all cores use up to ``threads``."""
    function = source(variant)
    assert function is not None, variant
    options = OPTIONS.get(variant.function, {})
    # numba has as many threads as there were cores when it was first imported, and cannot have more.
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    jitted: Callable[..., None] = numba.njit(SIGNATURES[variant.program], **options)(function)
    return jitted


def is_packed(jitted: Any) -> bool:
    """Return whether the machine code of a compiled variant has float32 arithmetic on whole registers."""
    return any(PACKED.search(text) for text in jitted.inspect_asm().values())
