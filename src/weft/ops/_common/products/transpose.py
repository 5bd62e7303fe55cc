"""Host code of transpose.cu: float32 operands that are contiguous across K, for wgmma."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource

TILE, THREADS = 64, 256  # rows and columns of a block's tile; threads of a block
# Not measured: a launch, and bytes that a copy moves each microsecond.
LAUNCH_US, BYTES_PER_US = 2.4, 4.0e6

SOURCE = CudaSource(
    file=Path(__file__).with_name("transpose.cu"), kernels=("transpose",), label="transpose-float32"
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


def estimated_us(elements: int) -> float:
    """Return the time in microseconds that a float32 matrix of so many elements is expected to take."""
    return LAUNCH_US + 2 * 4 * elements / BYTES_PER_US


def with_other_dimension_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of the float32 matrix ``x``, contiguous along the dimension along which ``x`` is not.

    ``x`` is contiguous along one dimension. The rows of the copy begin at multiples of 16 bytes.
    """
    x_rows = x if x.stride(1) == 1 else x.t()
    rows, columns = x_rows.shape
    y = x.new_empty(columns, -(-rows // 4) * 4)
    pitch = x_rows.stride(0)
    arguments = Arguments(
        x=x.data_ptr(),
        y=y.data_ptr(),
        rows=rows,
        columns=columns,
        x_pitch=pitch,
        y_pitch=y.shape[1],
        wide=int(x.data_ptr() % 16 == 0 and pitch % 4 == 0),
    )
    SOURCE["transpose"](-(-rows // TILE) * -(-columns // TILE), THREADS, arguments)
    y = y[:, :rows]
    return y.t() if x_rows is x else y
