"""Rows that are computed in the same way wherever they stand: for the batch-invariant variants.

How widely a row is read decides the order in which it is added up: CUDA kernels take the widest vectors that
fit every row, and Triton compiles a kernel apart for pointers and strides that 16 bytes divide. A part of a
batch begins at another address than the batch does, and its only row may have another stride.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from weft.core import YES, Case, Support, no

# On a CPU torch splits a single sum of so many elements among its threads, but none of several sums.
SPLIT_SUM = 32768
Rows = TypeVar("Rows", torch.Tensor, None)


def aligned_rows(x: Rows) -> Rows:
    """Return ``x`` contiguous and at a multiple of 16 bytes; copy it only if it is not. None stays None.

    The columns and the dtype alone then decide how widely a row can be read.
    """
    if x is None:
        return None
    rows: Any = x.contiguous()
    if rows.data_ptr() % 16:
        rows = rows.clone()
    # A single row counts as contiguous with any stride.
    return rows.view(-1).view(x.shape)


def supports_unsplit_sums(case: Case, device: str) -> Support:
    """Return no for rows whose sum torch splits among threads (on a CPU) if there is a single row."""
    shape = case.inputs[0].shape
    if shape and shape[-1] >= SPLIT_SUM:
        return no(f"rows of {SPLIT_SUM} elements or more: torch splits the sum of a single row")
    return YES
