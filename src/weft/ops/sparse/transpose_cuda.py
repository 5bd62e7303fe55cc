"""Transposition and gradients of sparse products in CUDA C++; see transpose.cu."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.backends.nvrtc import CudaSource
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops.sort import with_cuda as sort_by_cuda
from weft.ops.sparse.spec import MAX_INT32
from weft.ops.sparse.transpose import Product, Transposition

THREADS, ITEMS = 256, 8


@cache
def source(dtype: torch.dtype, offsets: torch.dtype = torch.int32, lanes: int = 1) -> CudaSource:
    """Return the program for one dtype, one type of offsets, and ``lanes`` lanes for a nonzero's gradient."""
    return CudaSource(
        file=Path(__file__).with_name("transpose.cu"),
        kernels=("nonzero_rows", "gather_nonzeros", "column_starts", "value_gradients"),
        defines=(
            ("WEFT_T", CUDA_TYPES[dtype]),
            ("OFFSET_BITS", str(8 * offsets.itemsize)),
            ("LANES", str(lanes)),
            ("THREADS", str(THREADS)),
        ),
        label=f"transpose-{dtype_name(dtype)}-{dtype_name(offsets)}-{lanes}",
    )


def transpose(columns: Tensor, offsets: Tensor, size: int) -> Transposition:
    """Return what :func:`weft.ops.sparse.transpose.transpose` does, of tensors on a GPU."""
    nonzeros, rows = columns.shape[0], offsets.shape[0] - 1
    columns, offsets = columns.contiguous(), offsets.contiguous()
    row_of, keys = torch.empty((2, nonzeros), dtype=torch.int32, device=columns.device)
    # Numbers of nonzeros in 64 bits where 32 do not count them.
    starts_dtype = torch.int32 if nonzeros <= MAX_INT32 else torch.int64
    starts = torch.zeros(size + 1, dtype=starts_dtype, device=columns.device)
    if nonzeros == 0:
        return Transposition(row_of, keys.long(), keys, starts)
    if rows > MAX_INT32 - 2**16:
        offsets = offsets.long()  # a search adds its distances to row numbers
    tiles = -(-nonzeros // (THREADS * ITEMS))
    sizes = (rows, nonzeros, size, rows / nonzeros)
    source(torch.float32, offsets.dtype)["nonzero_rows"](
        tiles, THREADS, columns, offsets, row_of, keys, *sizes
    )
    sorted_keys, order = sort_by_cuda.run(keys, descending=False, pairs=True)
    # The rows are moved as values of 32 bits.
    moved = moved_values(row_of.view(torch.float32), order).view(torch.int32)
    blocks = -(-(size + 1) // THREADS)
    program = source(torch.float32, starts_dtype)
    program["column_starts"](blocks, THREADS, sorted_keys, starts, nonzeros, size)
    return Transposition(row_of, order, moved, starts)


def moved_values(values: Tensor, order: Tensor) -> Tensor:
    """Return the values in the order of the transposed matrix."""
    values = values.contiguous()
    moved, nonzeros = torch.empty_like(values), values.shape[0]
    if nonzeros:
        blocks = -(-nonzeros // THREADS)
        source(values.dtype)["gather_nonzeros"](blocks, THREADS, order, values, moved, nonzeros)
    return moved


def gradient_of_values(grad: Tensor, rows: Tensor, columns: Tensor, dense: Tensor) -> Tensor:
    """Return what :func:`weft.ops.sparse.transpose.gradient_of_values` does, of tensors on a GPU."""
    nonzeros, size = columns.shape[0], dense.shape[0]
    k = dense.shape[1] if dense.dim() == 2 else 1
    gradients = grad.new_empty(nonzeros)
    if nonzeros == 0 or size == 0 or k == 0:
        return gradients.zero_()
    lanes = min(32, 1 << (k - 1).bit_length())
    blocks = -(-nonzeros // (THREADS // lanes))
    arguments = (grad.contiguous(), dense.contiguous(), rows, columns.contiguous(), gradients)
    source(grad.dtype, lanes=lanes)["value_gradients"](blocks, THREADS, *arguments, nonzeros, size, k)
    return gradients


def backward_by(product: Product) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the backward of an implementation on a GPU whose forward is ``product``."""

    def backward(
        grad: Tensor, values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor
    ) -> tuple[Tensor, Tensor]:
        t = transpose(columns, offsets, dense.shape[0])
        transposed = product(moved_values(values, t.order), t.columns, t.offsets, grad)
        return gradient_of_values(grad, t.rows, columns, dense), transposed

    return backward
