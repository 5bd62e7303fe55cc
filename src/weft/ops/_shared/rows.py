"""A tensor as rows: what kernels that take one row stride need of their arguments."""

from __future__ import annotations

import torch


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as ``(rows, columns)``, whose columns lie side by side; a copy only where they do not.

    A tensor whose leading dimensions are one stride (a slice of columns, an expanded row) is viewed
    as it stands. ``x`` has one dimension at least, and elements.
    """
    columns = x.shape[-1]
    if x.is_contiguous():
        return x.view(-1, columns)
    if x.stride(-1) != 1 and columns != 1:
        return x.contiguous().view(-1, columns)
    if x.dim() == 2:
        return x
    try:
        return x.view(-1, columns)
    except RuntimeError:  # the leading dimensions have no common stride
        return x.contiguous().view(-1, columns)


def width(columns: int, *rows: torch.Tensor) -> int:
    """The most elements (a power of two, up to 16 bytes) that every access to ``rows`` may take.

    ``rows`` are 2-D as :func:`as_rows` gives them: every row of each must start on the access's own
    alignment, and hold a whole number of accesses.
    """
    size = rows[0].element_size()
    fits = columns * size
    for x in rows:
        fits |= x.data_ptr() | (x.stride(0) * size)
    return min(16, fits & -fits) // size
