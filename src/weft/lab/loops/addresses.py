"""Order of the accesses of each loop nest: the byte addresses of its loads and stores, as numpy arrays.

A stream is an iterable of pieces, one for some turns of an outer loop, so that a long nest needs little
memory. The order is that of the Python functions in ``in_numba``, and the tests record those to compare.
Arrays lie one after the other, each from the next multiple of ``ALIGNMENT``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.lab.loops.variants import STRIP, TILE, Variant

ITEM, ALIGNMENT = 4, 64
PIECE = 1 << 20  # accesses of the sum in one piece
Addresses = NDArray[np.int64]
Index = NDArray[np.int64]


class Layout:
    """Two-dimensional float32 array of ``columns``, at a byte address."""

    def __init__(self, start: int, columns: int) -> None:
        self.start, self.columns = start, columns

    def __call__(self, i: Any, j: Any) -> Addresses:
        """Return the addresses of the elements [i, j], which broadcast."""
        at: Addresses = self.start + ITEM * (np.asarray(i, dtype=np.int64) * self.columns + j)
        return at


def layouts(*shapes: tuple[int, int]) -> list[Layout]:
    """Place arrays (rows, columns) one after the other."""
    start, placed = 0, []
    for rows, columns in shapes:
        placed.append(Layout(start, columns))
        start += -(-rows * columns * ITEM // ALIGNMENT) * ALIGNMENT
    return placed


def _together(*columns: Addresses) -> Addresses:
    """Interleave accesses: for each index in order, one of each column; they broadcast against each other."""
    return np.stack(np.broadcast_arrays(*columns), axis=-1).reshape(-1)


# Product: a (m, k), b (k, n), c (m, n)


def _product_layouts(m: int, n: int, k: int) -> list[Layout]:
    return layouts((m, k), (k, n), (m, n))


def _product_naive(m: int, n: int, k: int) -> Iterator[Addresses]:
    a, b, c = _product_layouts(m, n, k)
    p, j = np.arange(k), np.arange(n)[:, None]
    for i in range(m):
        products = np.stack(np.broadcast_arrays(a(i, p), b(p, j)), axis=-1).reshape(n, 2 * k)
        yield np.concatenate([products, c(i, j)], axis=1).reshape(-1)


def _multiply_add(a: Layout, b: Layout, c: Layout, i: Index | int, p: Index, j: Index) -> Addresses:
    """For each row of i and p: a factor of a, then for each j a load of c and b, and a store of c."""
    inner = np.stack(np.broadcast_arrays(c(i, j), b(p, j), c(i, j)), axis=-1)
    inner = inner.reshape(*inner.shape[:-2], inner.shape[-2] * 3)
    factor = np.broadcast_to(a(i, p), (*inner.shape[:-1], 1))
    return np.concatenate([factor, inner], axis=-1).reshape(-1)


def _product_interchange(m: int, n: int, k: int) -> Iterator[Addresses]:
    a, b, c = _product_layouts(m, n, k)
    p, j = np.arange(k)[:, None], np.arange(n)
    for i in range(m):
        yield c(i, j)
        yield _multiply_add(a, b, c, i, p, j)


def _product_tiling(m: int, n: int, k: int) -> Iterator[Addresses]:
    a, b, c = _product_layouts(m, n, k)
    i = np.arange(m)[:, None, None]
    yield c(np.arange(m)[:, None], np.arange(n)).reshape(-1)
    for jj in range(0, n, TILE):
        j = np.arange(jj, min(jj + TILE, n))
        for pp in range(0, k, TILE):
            yield _multiply_add(a, b, c, i, np.arange(pp, min(pp + TILE, k))[:, None], j)


def _product_unroll_and_jam(m: int, n: int, k: int) -> Iterator[Addresses]:
    a, b, c = _product_layouts(m, n, k)
    j = np.arange(n)
    whole = k // 4 * 4
    p = np.arange(0, whole, 4)[:, None]
    for i in range(m):
        yield c(i, j)
        factors = _together(*(a(i, p + q) for q in range(4))).reshape(-1, 4)
        inner = _together(c(i, j), *(b(p + q, j) for q in range(4)), c(i, j)).reshape(whole // 4, 6 * n)
        yield np.concatenate([factors, inner], axis=1).reshape(-1)
        yield _multiply_add(a, b, c, i, np.arange(whole, k)[:, None], j)


# Stencil: x, t and y (rows, columns)


def _update(x: Layout, y: Layout, i: Any, j: Any) -> Addresses:
    """Five loads of x around [i, j] and a store of y, for each index in order."""
    return _together(x(i, j), x(i - 1, j), x(i + 1, j), x(i, j - 1), x(i, j + 1), y(i, j))


def _sweeps(rows: int, columns: int) -> tuple[tuple[Layout, Layout], tuple[Layout, Layout]]:
    x, t, y = layouts(*[(rows, columns)] * 3)
    return (x, t), (t, y)


def _stencil_naive(rows: int, columns: int) -> Iterator[Addresses]:
    i = np.arange(1, rows - 1)
    for source, target in _sweeps(rows, columns):
        for j in range(1, columns - 1):
            yield _update(source, target, i, j)


def _stencil_interchange(rows: int, columns: int) -> Iterator[Addresses]:
    j = np.arange(1, columns - 1)
    for source, target in _sweeps(rows, columns):
        for i in range(1, rows - 1):
            yield _update(source, target, i, j)


def _stencil_tiling(rows: int, columns: int) -> Iterator[Addresses]:
    for source, target in _sweeps(rows, columns):
        for jj in range(1, columns - 1, STRIP):
            j = np.arange(jj, min(jj + STRIP, columns - 1))
            for i in range(1, rows - 1):
                yield _update(source, target, i, j)


def _stencil_fusion(rows: int, columns: int) -> Iterator[Addresses]:
    x, t, y = layouts((rows, columns), (3, columns), (rows, columns))
    every, j = np.arange(columns), np.arange(1, columns - 1)
    yield _together(x(0, every), t(0, every))
    for i in range(1, rows):
        row, above, middle = i % 3, (i - 2) % 3, (i - 1) % 3
        if i < rows - 1:
            yield _together(x(i, np.array([0])), t(row, 0))
            yield _together(x(i, j), x(i - 1, j), x(i + 1, j), x(i, j - 1), x(i, j + 1), t(row, j))
            yield _together(x(i, np.array([columns - 1])), t(row, columns - 1))
        else:
            yield _together(x(i, every), t(row, every))
        if i >= 2:
            loads = (t(middle, j), t(above, j), t(row, j), t(middle, j - 1), t(middle, j + 1))
            yield _together(*loads, y(i - 1, j))


def _stencil_fission(rows: int, columns: int) -> Iterator[Addresses]:
    j = np.arange(1, columns - 1)
    for source, target in _sweeps(rows, columns):
        for i in range(1, rows - 1):
            yield _together(source(i, j), source(i, j - 1), source(i, j + 1), target(i, j))
        for i in range(1, rows - 1):
            yield _together(target(i, j), source(i - 1, j), source(i + 1, j), target(i, j))


# Sum: x (n), out (1)


def _sum_naive(n: int) -> Iterator[Addresses]:
    x, out = layouts((1, n), (1, 1))
    for first in range(0, n, PIECE):
        yield x(0, np.arange(first, min(first + PIECE, n)))
    yield out(0, np.array([0]))


STREAMS: Mapping[tuple[str, str], Callable[..., Iterator[Addresses]]] = {
    ("product", "naive"): _product_naive,
    ("product", "interchange"): _product_interchange,
    ("product", "tiling"): _product_tiling,
    ("product", "unroll-and-jam"): _product_unroll_and_jam,
    ("stencil", "naive"): _stencil_naive,
    ("stencil", "interchange"): _stencil_interchange,
    ("stencil", "tiling"): _stencil_tiling,
    ("stencil", "fusion"): _stencil_fusion,
    ("stencil", "fission"): _stencil_fission,
    ("sum", "naive"): _sum_naive,
}


def stream(variant: Variant, shape: tuple[int, ...]) -> Iterator[Addresses]:
    """Return the accesses of a variant at a shape, in pieces."""
    return STREAMS[variant.program, variant.stream](*shape)
