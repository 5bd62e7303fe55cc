"""Host code of align_rows.cu: operands of a product whose rows the copy engine cannot read, copied."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.ops._common.hopper import tensor_map
from weft.ops._common.layout import CUDA_TYPES, dtype_name

THREADS, UNROLL, VECTOR_BYTES = 256, 4, 16  # as in align_rows.cu


class Arguments(ctypes.Structure):
    """``AlignArguments`` of align_rows.cu."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_longlong),
        ("columns", ctypes.c_longlong),
        ("x_pitch", ctypes.c_longlong),
        ("vectors", ctypes.c_longlong),
    )


@cache
def source(dtype: torch.dtype) -> CudaSource:
    """Return the program for one element type."""
    return CudaSource(
        file=Path(__file__).with_name("align_rows.cu"),
        kernels=("align_rows",),
        defines=(("WEFT_T", CUDA_TYPES[dtype]),),
        label=f"align_rows-{dtype_name(dtype)}",
    )


def padded(columns: int, itemsize: int) -> int:
    """Return the number of elements in whole 16 bytes, for so many columns."""
    width = VECTOR_BYTES // itemsize
    return -(-columns // width) * width


def with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of the matrix ``x`` whose rows begin at multiples of 16 bytes.

    ``x`` is contiguous along one dimension, and so is the copy. Behind a row's end are zeros.
    """
    is_by_rows = tensor_map.contiguous_dimension(x) == 1
    x_rows = x if is_by_rows else x.t()
    rows, columns = x_rows.shape
    y = x.new_empty(rows, padded(columns, x.element_size()))
    vectors = y.shape[1] * x.element_size() // VECTOR_BYTES
    arguments = Arguments(x.data_ptr(), y.data_ptr(), rows, columns, x_rows.stride(0), vectors)
    source(x.dtype)["align_rows"](-(-rows * vectors // (THREADS * UNROLL)), THREADS, arguments)
    y = y[:, :columns]
    return y if is_by_rows else y.t()
