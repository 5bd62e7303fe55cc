"""Dtypes and memory layout of kernel arguments: C++ types, dense tensors, 2-D views, vector widths."""

from __future__ import annotations

import math

import torch

# PyTorch dtype -> C++ type in a CUDA source
CUDA_TYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.int64: "long long",
    torch.int32: "int",
    torch.bool: "bool",
}
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # storage types of most operators
HALF_DTYPES = (torch.float16, torch.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def contiguous_like(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised row-major tensor with the shape, dtype and device of ``x``."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with no gaps between its elements, in the stride order that ``empty_like`` gives.

    A transposed tensor is already dense and is returned unchanged; a slice or an expanded row is copied.
    """
    if x.is_contiguous():
        return x
    # empty_like keeps the order of a dense tensor's strides; other strides differ, and are copied.
    like = torch.empty_like(x)
    return x if x.stride() == like.stride() else like.copy_(x)


def match_strides(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return ``grad`` with the strides of a dense ``x``; copy it only if its strides differ."""
    return grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)


def flat(x: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements in storage order, as a view of shape ``(numel,)``."""
    # A dense tensor's elements fill numel() consecutive positions, in whatever order of dimensions.
    return x.as_strided((x.numel(),), (1,))


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """Return ``(rows, columns)`` of a tensor ``(..., columns)``, which may have no elements."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def view_2d(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as ``(rows, columns)`` with adjacent columns; copy it only if no such view exists.

    A tensor whose leading dimensions have a common stride (a slice of columns, an expanded row) is viewed
    without a copy. ``x`` has at least one dimension and at least one element.
    """
    columns = x.shape[-1]
    if x.is_contiguous():
        return x.view(-1, columns)
    # With one column its stride has no meaning, and no copy is needed.
    if x.stride(-1) != 1 and columns != 1:
        return x.contiguous().view(-1, columns)
    if x.dim() == 2:
        return x
    try:
        return x.view(-1, columns)
    except RuntimeError:  # the leading dimensions have no common stride
        return x.contiguous().view(-1, columns)


def view_3d(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as (batches, rows, columns) with adjacent columns; copy it only if no such view exists."""
    rows, columns = x.shape[-2:]
    if x.stride(-1) != 1 and columns != 1:
        x = x.contiguous()
    try:
        return x.view(-1, rows, columns)
    except RuntimeError:  # the leading dimensions have no common stride
        return x.contiguous().view(-1, rows, columns)


def max_vec_width(columns: int, *tensors_2d: torch.Tensor) -> int:
    """Return the widest vector, in elements, that fits every row of ``tensors_2d``.

    The width is a power of two, at most 16 bytes. Each row of each tensor (as :func:`view_2d` returns them)
    starts at a multiple of the vector's size and holds a whole number of vectors.
    """
    size = tensors_2d[0].element_size()
    # The lowest set bit of the OR of all sizes and addresses is their largest common power of two.
    alignment = columns * size
    for x in tensors_2d:
        alignment |= x.data_ptr() | (x.stride(0) * size)
    return min(16, alignment & -alignment) // size


# How rows that are not whole 16-byte vectors at aligned addresses are moved: PEEL of row_view.cuh.
NO_PEEL, ALIGNED_ALIKE, SHIFTED = 0, 1, 2
PEEL_BYTES = 128  # shorter rows have too few whole vectors


def peel_of(columns: int, output2d: torch.Tensor, *inputs2d: torch.Tensor) -> int:
    """Return how 16-byte vectors can move the rows of these tensors, as ``PEEL`` of row_view.cuh.

    ``NO_PEEL``: every row is a whole number of aligned vectors (``max_vec_width`` then has 16 bytes), or rows
    are shorter than ``PEEL_BYTES``. ``ALIGNED_ALIKE``: a row begins equally far behind a multiple of 16 bytes
    in all tensors. ``SHIFTED``: anything else. Tensors are as :func:`view_2d` returns them, of one dtype.
    """
    size = output2d.element_size()
    if columns * size < PEEL_BYTES or max_vec_width(columns, output2d, *inputs2d) * size == 16:
        return NO_PEEL
    base, step = output2d.data_ptr(), output2d.stride(0) * size
    alike = all((x.data_ptr() - base) % 16 == 0 and (x.stride(0) * size - step) % 16 == 0 for x in inputs2d)
    return ALIGNED_ALIKE if alike else SHIFTED
