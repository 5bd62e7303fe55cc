"""Rotary embedding in CUDA C++: one position of four heads a thread; see rope.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
THREADS, HEADS = 128, 4  # as rope.cu has them


@cache
def source(dtype: torch.dtype, access: int, interleaved: bool) -> CudaSource:
    """rope.cu for one element type and convention, ``access`` elements moving at a time."""
    return CudaSource(
        file=Path(__file__).with_name("rope.cu"),
        kernels=("rope_turn",),
        defines=(
            ("WEFT_T", TYPES[dtype]),
            ("ACCESS", str(access)),
            ("INTERLEAVED", str(int(interleaved))),
        ),
        label=f"{str(dtype).removeprefix('torch.')}-{access}" + "-interleaved" * interleaved,
    )


def _access(x: torch.Tensor, interleaved: bool) -> int:
    """The most elements (a power of two, up to 16 bytes) that every access may take."""
    size, run = x.element_size(), x.shape[3] if interleaved else x.shape[3] // 2
    fits = x.data_ptr() | run * size
    for stride in x.stride()[:3]:
        fits |= stride * size
    return min(16, fits & -fits) // size


def _table(table: torch.Tensor) -> torch.Tensor:
    if table.is_contiguous() and table.data_ptr() % 16 == 0:
        return table
    return table.clone(memory_format=torch.contiguous_format)


def _turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, sign: int
) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return y
    batch, heads, length, size = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    access = _access(x, interleaved)
    each = size // 2 // (max(1, access // 2) if interleaved else access)
    blocks = -(-length * each // THREADS) * -(-batch * heads // HEADS)
    source(x.dtype, access, interleaved)["rope_turn"](
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
    return _turn(x, cos, sin, interleaved, 1)


def backward(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor]:
    return (_turn(grad, cos, sin, interleaved, -1),)


IMPLEMENTATION = Implementation(
    operator="rope",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=(
        source(torch.bfloat16, 8, False),
        source(torch.bfloat16, 8, True),
        source(torch.float32, 4, False),
        source(torch.float32, 4, True),
        source(torch.float16, 8, False),
        source(torch.float16, 1, True),
    ),
    idea="tables read once for four heads, whose rows are all in flight",
)
