"""Host code of transpose.cu: operands of a product that are contiguous across K, copied along it."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.ops._common.layout import CUDA_TYPES, dtype_name

TILE, THREADS = 64, 256  # rows and columns of a block's tile; threads of a block
# Not measured: a launch, and bytes that a copy moves each microsecond.
LAUNCH_US, BYTES_PER_US = 2.4, 4.0e6


@cache
def source(dtype: torch.dtype) -> CudaSource:
    """Return the program for one element type."""
    return CudaSource(
        file=Path(__file__).with_name("transpose.cu"),
        kernels=("transpose",),
        defines=(("WEFT_T", CUDA_TYPES[dtype]),),
        label=f"transpose-{dtype_name(dtype)}",
    )


class Arguments(ctypes.Structure):
    """``TransposeArguments`` of transpose.cu."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_longlong),
        ("columns", ctypes.c_longlong),
        ("x_pitch", ctypes.c_longlong),
        ("y_pitch", ctypes.c_longlong),
        ("wide", ctypes.c_int),
    )


def estimated_us(nbytes: int) -> float:
    """Return the time in microseconds that a matrix of so many bytes is expected to take."""
    return LAUNCH_US + 2 * nbytes / BYTES_PER_US


def with_other_dimension_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of the matrix ``x``, contiguous along the dimension along which ``x`` is not.

    ``x`` is contiguous along one dimension. The rows of the copy begin at multiples of 16 bytes.
    """
    x_rows = x if x.stride(1) == 1 else x.t()
    rows, columns = x_rows.shape
    width = 16 // x.element_size()
    y = x.new_empty(columns, -(-rows // width) * width)
    pitch = x_rows.stride(0)
    arguments = Arguments(
        x=x.data_ptr(),
        y=y.data_ptr(),
        rows=rows,
        columns=columns,
        x_pitch=pitch,
        y_pitch=y.shape[1],
        wide=int(x.data_ptr() % 16 == 0 and pitch % width == 0),
    )
    source(x.dtype)["transpose"](-(-rows // TILE) * -(-columns // TILE), THREADS, arguments)
    y = y[:, :rows]
    return y.t() if x_rows is x else y
