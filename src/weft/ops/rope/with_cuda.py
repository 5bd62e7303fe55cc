"""Rotary embedding in CUDA C++: a thread has one position of four heads; see rope.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.ops._common.layout import CUDA_TYPES, contiguous_like, dtype_name

THREADS, HEADS = 128, 4  # the constants of rope.cu


@cache
def source(dtype: torch.dtype, vec_width: int, interleaved: bool) -> CudaSource:
    """Return rope.cu for one element type and pairing; vectors have ``vec_width`` elements."""
    return CudaSource(
        file=Path(__file__).with_name("rope.cu"),
        kernels=("rope_turn",),
        defines=(
            ("WEFT_T", CUDA_TYPES[dtype]),
            ("VEC_WIDTH", str(vec_width)),
            ("INTERLEAVED", str(int(interleaved))),
        ),
        label=f"{dtype_name(dtype)}-{vec_width}" + "-interleaved" * interleaved,
    )


def _vec_width(x: torch.Tensor, interleaved: bool) -> int:
    """Return the widest vector, in elements (a power of two, up to 16 bytes), that fits every row."""
    size, run = x.element_size(), x.shape[3] if interleaved else x.shape[3] // 2
    # The lowest set bit of the OR of addresses and sizes is their largest common power of two.
    alignment = x.data_ptr() | run * size
    for stride in x.stride()[:3]:
        alignment |= stride * size
    return min(16, alignment & -alignment) // size


def _table(table: torch.Tensor) -> torch.Tensor:
    # The kernel reads the tables by float4. They are small beside x, so that a copy costs little.
    if table.is_contiguous() and table.data_ptr() % 16 == 0:
        return table
    return table.clone(memory_format=torch.contiguous_format)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, sign: int
) -> torch.Tensor:
    y = contiguous_like(x)
    if not x.numel():
        return y
    batch, heads, length, size = x.shape
    # Vectors need adjacent elements; the other strides may be any.
    x = x if x.stride(3) == 1 else x.contiguous()
    vec_width = _vec_width(x, interleaved)
    # A vector holds vec_width / 2 pairs if they are interleaved, otherwise vec_width elements of one half.
    vecs_per_position = size // 2 // (max(1, vec_width // 2) if interleaved else vec_width)
    blocks = -(-length * vecs_per_position // THREADS) * -(-batch * heads // HEADS)
    source(x.dtype, vec_width, interleaved)["rope_turn"](
        blocks,
        THREADS,
        x,
        _table(cos),
        _table(sin),
        y,
        batch * heads,
        heads,
        length,
        size // 2,
        *x.stride()[:3],
        sign,
    )
    return y


def forward(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    return _rotate(x, cos, sin, interleaved, 1)


def backward(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor]:
    return (_rotate(grad, cos, sin, interleaved, -1),)


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="rope",
        backend="cuda",
        forward=forward,
        backward=backward,
        aot_kernels=(
            source(torch.bfloat16, 8, False),
            source(torch.bfloat16, 8, True),
            source(torch.float32, 4, False),
            source(torch.float32, 4, True),
            source(torch.float16, 8, False),
            source(torch.float16, 1, True),
        ),
        idea="tables read once for four heads, whose rows are all in flight",
    )
)
