"""Form in which kernels read a tensor that is reduced: outer x n x inner with a stride for each."""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.ops.reduce.spec import extents


class Strided(NamedTuple):
    """A tensor as (outer, n, inner), of which the middle dimension is reduced; strides in elements.

    ``by_rows``: the elements of a result are adjacent (n_stride is 1, inner is 1). Otherwise adjacent
    elements belong to adjacent results (inner_stride is 1).
    """

    x: torch.Tensor
    outer: int
    n: int
    inner: int
    outer_stride: int
    n_stride: int
    by_rows: bool

    @property
    def results(self) -> int:
        return self.outer * self.inner


def strided(x: torch.Tensor, first: int, last: int) -> Strided:
    """Return a tensor with at least one element in this form; copy it only if no such form exists.

    A transposed matrix is read as it lies: its rows are reduced as another matrix's columns.
    """
    outer, n, inner = extents(x.shape, first, last)
    try:
        x3 = x.view(outer, n, inner)
    except RuntimeError:  # dimensions without a common stride
        x3 = x.contiguous().view(outer, n, inner)
    form = _form(x3)
    if form is None:
        form = _form(x.contiguous().view(outer, n, inner))
    assert form is not None, "a contiguous tensor has a form"
    return form


def _form(x3: torch.Tensor) -> Strided | None:
    (outer, n, inner), (so, sn, si) = x3.shape, x3.stride()
    # A dimension of size 1 has no stride that matters.
    if sn == 1 or n == 1:
        if inner == 1:
            return Strided(x3, outer, n, 1, so if outer > 1 else n, 1, by_rows=True)
        if outer == 1 and n > 1:
            return Strided(x3, inner, n, 1, si, 1, by_rows=True)
    if inner > 1 and si == 1:
        return Strided(x3, outer, n, inner, so, sn, by_rows=False)
    if inner == 1 and outer > 1 and so == 1:
        return Strided(x3, 1, n, outer, 0, sn, by_rows=False)
    if inner == 1 and outer == 1:
        # One result of elements that are not adjacent: a column.
        return Strided(x3, 1, n, 1, 0, sn, by_rows=False)
    return None
