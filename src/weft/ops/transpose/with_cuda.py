"""Transpose in CUDA C++ by tiles in shared memory and 16-byte accesses on both sides; see transpose.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._common.layout import view_3d
from weft.ops.transpose.spec import empty_transpose

# C++ types of words by the bytes of an element: bits are moved, whatever the dtype.
WORD_TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
MAX_THREADS = 256
MAX_BLOCKS = (1 << 31) - 1  # of a grid's x


def row_bytes(size: int, access: int) -> int:
    """Return the bytes of a tile's row, for elements and accesses of these sizes.

    256 bytes are two lines of the caches. A tile of 1-byte elements would then take 64 KiB; one by accesses
    of 4 bytes or fewer has as many loads in flight with 128.
    """
    return 256 if size > 1 and access >= 8 else 128


def threads_of(size: int, access: int) -> int:
    """Return the threads of a block: one for each sub-tile of a tile, at most ``MAX_THREADS``."""
    return min(MAX_THREADS, (row_bytes(size, access) // access) ** 2)


@cache
def source(size: int, access: int) -> CudaSource:
    """Return the program for elements of ``size`` bytes and accesses of ``access`` bytes."""
    numbers = (
        ("ACCESS", access),
        ("ROW_BYTES", row_bytes(size, access)),
        ("THREADS", threads_of(size, access)),
    )
    return CudaSource(
        file=Path(__file__).with_name("transpose.cu"),
        kernels=("transpose",),
        defines=(("WEFT_T", WORD_TYPES[size]), *((name, str(value)) for name, value in numbers)),
        label=f"{8 * size}-bit-{access}",
    )


def access_bytes(x3d: torch.Tensor, y: torch.Tensor) -> int:
    """Return the bytes of an access: the largest power of two, up to 16, that divides every row's address
    and length on both sides."""
    batches, rows, columns = x3d.shape
    lengths = rows | columns | x3d.stride(1) | (x3d.stride(0) if batches > 1 else 0)
    union = x3d.data_ptr() | y.data_ptr() | lengths * x3d.element_size()
    return min(16, union & -union)


def forward(x: torch.Tensor) -> torch.Tensor:
    y = empty_transpose(x)
    if x.numel() == 0:
        return y
    # Elements that lie in the output's order already: a copy.
    if 1 in x.shape[-2:] or x.transpose(-1, -2).is_contiguous():
        return y.copy_(x.transpose(-1, -2))
    x3d = view_3d(x)
    batches, rows, columns = x3d.shape
    size, access = x.element_size(), access_bytes(x3d, y)
    side = row_bytes(size, access) // size
    tiles = batches * -(-rows // side) * -(-columns // side)
    source(size, access)["transpose"](
        min(tiles, MAX_BLOCKS),
        threads_of(size, access),
        x3d,
        y,
        batches,
        rows,
        columns,
        x3d.stride(0),
        x3d.stride(1),
    )
    return y


def backward(grad: torch.Tensor) -> tuple[torch.Tensor]:
    return (forward(grad),)


IMPLEMENTATION = Implementation(
    operator="transpose",
    backend="cuda",
    forward=forward,
    backward=backward,
    aot_kernels=tuple(
        source(size, access) for size in WORD_TYPES for access in (1, 2, 4, 8, 16) if access >= size
    ),
    idea="16-byte accesses on both sides, sub-tiles transposed in registers, swizzled shared memory",
)
