"""Tensor maps: how the copy engine (TMA) finds the boxes of a matrix in global memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from weft.backends.nvrtc import recorders

SWIZZLE_BYTES = 128  # of a row of a box in shared memory, whose 16-byte chunks are swizzled
MAX_BOX = 256  # elements of a box along one dimension
MAX_EXTENT = 1 << 31  # coordinates are 32-bit and signed


class TensorMap(ctypes.Structure):
    """``hopper::TensorMap``, 128 opaque bytes."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def fits(x: torch.Tensor) -> bool:
    """Return True if the copy engine can read the matrix ``x`` as it is stored.

    One dimension is contiguous; the matrix and its rows begin at multiples of 16 bytes.
    """
    inner = contiguous_dimension(x)
    row_bytes = x.stride(1 - inner) * x.element_size()
    return (
        x.stride(inner) == 1
        and x.data_ptr() % 16 == 0
        and row_bytes % 16 == 0
        and row_bytes < 1 << 40
        and max(x.shape) < MAX_EXTENT
    )


def contiguous_dimension(x: torch.Tensor) -> int:
    """Return the dimension of a matrix along which its elements are contiguous; 1 if both may be."""
    return 1 if x.stride(1) == 1 or x.shape[1] == 1 else 0


def encode(x: torch.Tensor, box_rows: int, box_bytes: int = SWIZZLE_BYTES) -> TensorMap:
    """Return the map of boxes of ``box_rows`` rows by 128 (or 64) bytes; see :func:`fits`."""
    if x.is_meta:  # of a dry run, which launches nothing and may have no driver
        return TensorMap()
    return _noted(encoder(x, box_rows, box_bytes), x.data_ptr())


def _noted(make: Callable[[int], TensorMap], pointer: int) -> TensorMap:
    """Return the map at an address. A call that is recorded gets to know how to make it for others."""
    tensor_map = make(pointer)
    if recorders and (recorder := recorders.get(threading.get_ident())) is not None:
        recorder.maps[bytes(tensor_map)] = (pointer, make)
    return tensor_map


def encoder(x: torch.Tensor, box_rows: int, box_bytes: int = SWIZZLE_BYTES) -> Callable[[int], TensorMap]:
    """Return the function that makes the map of a matrix like ``x`` at an address; see :func:`encode`."""
    inner = contiguous_dimension(x)
    dtype, columns, rows = x.dtype, x.shape[inner], x.shape[1 - inner]
    row_bytes = x.stride(1 - inner) * x.element_size()
    more = () if box_bytes == SWIZZLE_BYTES else (box_bytes,)
    return lambda pointer: _encode(pointer, dtype, columns, rows, row_bytes, box_rows, *more)


def fits_heads(x: torch.Tensor) -> bool:
    """Return True if the copy engine can read ``x`` (B, H, T, D) with T, H and B as dimensions of their own.

    Columns are adjacent, and rows begin at multiples of 16 bytes. An expanded dimension (stride 0) is not
    read: the copy engine's documentation asks for strides of at least a row.
    """
    strides = [s for s, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
    return (
        x.stride(3) == 1
        and x.data_ptr() % 16 == 0
        and all(s > 0 and s * x.element_size() % 16 == 0 and s < 1 << 38 for s in strides)
        and max(x.shape) < MAX_EXTENT
    )


def encode_heads(x: torch.Tensor, box_rows: int) -> TensorMap:
    """Return the map (D, T, H, B) of boxes of ``box_rows`` rows of a head by 128 bytes; see fits_heads.

    Rows beyond T are read as 0 and never written, also where another head's rows follow in memory.
    """
    if x.is_meta:
        return TensorMap()
    b, h, t, d = x.shape
    row_bytes = d * x.element_size()  # of a dimension of size 1, whose stride has no meaning
    strides = [
        stride * x.element_size() if size > 1 else row_bytes
        for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True)
    ]
    dtype, backwards = x.dtype, tuple(reversed(strides))
    return _noted(lambda p: _encode_heads(p, dtype, (d, t, h, b), backwards, box_rows), x.data_ptr())


@lru_cache(maxsize=4096)
def _encode_heads(
    pointer: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box_rows: int
) -> TensorMap:
    return _encode_tiled(pointer, dtype, sizes, strides, (box_rows, 1, 1))


# A map depends on these numbers alone, not on what the memory holds: it stays valid whoever owns it.
@lru_cache(maxsize=4096)
def _encode(
    pointer: int,
    dtype: torch.dtype,
    columns: int,
    rows: int,
    row_bytes: int,
    box_rows: int,
    box_bytes: int = SWIZZLE_BYTES,
) -> TensorMap:
    return _encode_tiled(pointer, dtype, (columns, rows), (row_bytes,), (box_rows,), box_bytes)


def _encode_tiled(
    pointer: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    box_bytes: int = SWIZZLE_BYTES,
) -> TensorMap:
    """Return a map of ``sizes``, the contiguous dimension first.

    ``strides``, in bytes, and ``box`` are those of the other dimensions; along the first a box has
    ``box_bytes``, 128 or 64, which its swizzle has too.
    """
    from cuda.bindings import driver

    swizzles = {
        128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    }

    kinds: dict[torch.dtype, Any] = {
        torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.float32: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        # The copy engine moves fp8 as bytes; the fill outside of the matrix is 0 in both.
        torch.float8_e4m3fn: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        torch.float8_e5m2: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }
    status, encoded = driver.cuTensorMapEncodeTiled(
        kinds[dtype],
        len(sizes),
        pointer,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in (box_bytes // dtype.itemsize, *box)],
        [driver.cuuint32_t(1) for _ in sizes],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles[box_bytes],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status) != 0:
        raise RuntimeError(f"CUDA call failed: {status!r}")
    return TensorMap((ctypes.c_uint64 * 16)(*(int(word) for word in encoded.opaque)))
