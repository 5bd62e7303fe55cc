"""Bias and GELU in CUDA C++: 16 bytes a thread; the bias's gradient by chunks of rows.

See bias_gelu.cu and bias_gelu_backward.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._shared.elementwise import TYPES, Walk, contiguous_like

HERE = Path(__file__).parent
WALK = Walk(HERE / "bias_gelu.cu", "bias_gelu_forward")


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """A block of the backward: ``rows`` rows by 32 accesses a warp, and ``warps`` warps, of which
    ``groups`` share a column and the rest stand side by side.

    A warp has ``ahead`` of its rows under way; ``blocks`` a multiprocessor are made room for in
    registers. Blocks of ``totals`` warps add the chunks' sums; ``overlap``: they are launched
    before those are there, and wait for them.
    """

    rows: int = 128
    warps: int = 8
    groups: int = 8
    ahead: int = 2
    blocks: int = 4
    totals: int = 32
    overlap: bool = False


SHIPPED = Chunks()


def candidates() -> list[Chunks]:
    """The blocks worth timing, in the order of promise."""
    side = replace(SHIPPED, groups=4)  # two warps side by side: 1 KiB of a row in bf16
    small = replace(SHIPPED, warps=4, groups=4, blocks=8)
    tall = replace(SHIPPED, warps=16, groups=16, blocks=2, rows=256)
    return [
        SHIPPED,
        replace(SHIPPED, overlap=True),
        replace(SHIPPED, overlap=True, totals=8),
        replace(SHIPPED, totals=8),
        replace(tall, overlap=True),
        replace(tall, overlap=True, totals=8),
        replace(tall, overlap=True, totals=16),
        replace(tall, rows=512, overlap=True, totals=8),
        replace(tall, warps=32, groups=32, blocks=1, rows=512, overlap=True),
        replace(tall, ahead=4, blocks=1, rows=512, overlap=True),
        replace(SHIPPED, warps=12, groups=12, ahead=3, blocks=2, rows=192, overlap=True),
        replace(SHIPPED, ahead=3, blocks=3, overlap=True),
        replace(SHIPPED, ahead=3, blocks=3, rows=256, overlap=True),
        tall,
        side,
        replace(small, rows=64),
        small,
        replace(SHIPPED, rows=64),
        replace(SHIPPED, rows=256),
        replace(SHIPPED, ahead=3, blocks=3),
        replace(SHIPPED, ahead=1, blocks=5),
        replace(SHIPPED, ahead=1, blocks=5, rows=256),
        replace(side, ahead=1, blocks=5),
        replace(SHIPPED, groups=2, rows=64),
        replace(small, groups=1, rows=32, ahead=2),
    ]


@cache
def source(dtype: torch.dtype, chunks: Chunks = SHIPPED) -> CudaSource:
    """bias_gelu_backward.cu for one element type and block."""
    ways = ("bias_gelu_backward_wide", "bias_gelu_backward_any")
    c = chunks
    named = f"{str(dtype).removeprefix('torch.')}-{c.warps}-{c.groups}-{c.ahead}-{c.blocks}"
    return CudaSource(
        file=HERE / "bias_gelu_backward.cu",
        kernels=(*ways, "bias_gelu_sum_partials"),
        defines=(
            ("WEFT_T", TYPES[dtype]),
            ("BACK_WARPS", str(c.warps)),
            ("GROUPS", str(c.groups)),
            ("AHEAD", str(c.ahead)),
            ("BLOCKS", str(c.blocks)),
            ("TOTALS", str(c.totals)),
            ("OVERLAP", str(int(c.overlap))),
        ),
        label=f"bias_gelu_backward-{named}" + "-overlap" * c.overlap,
    )


def _wide(columns: int, *tensors: torch.Tensor) -> bool:
    size = tensors[0].element_size()
    return columns * size % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)


def forward(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = contiguous_like(x)
    columns = x.shape[-1]
    x, bias = x.contiguous(), bias.contiguous()
    WALK.run("bias_gelu_forward", (x, y), bias, columns, wide=_wide(columns, bias))
    return y


def backward(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return backward_with(SHIPPED, grad, x, bias)


def backward_with(
    chunks: Chunks, grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backward by one kind of block."""
    dx, dbias = contiguous_like(x), contiguous_like(bias)
    if not x.numel():
        return dx, dbias.zero_()
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    wide = _wide(columns, grad, x, bias, dx)
    access = 16 // x.element_size() if wide else 1
    across = -(-columns // (32 * access * (chunks.warps // chunks.groups)))
    parts = -(-rows // chunks.rows)
    partial = torch.empty(parts, columns, dtype=torch.float32, device=x.device)
    program = source(x.dtype, chunks)
    program["bias_gelu_backward_wide" if wide else "bias_gelu_backward_any"](
        *(across * parts, 32 * chunks.warps, grad, x, bias, dx, partial),
        *(rows, columns, chunks.rows, across),
    )
    program["bias_gelu_sum_partials"](
        *(-(-columns // 32), 32 * chunks.totals, partial, dbias, parts, columns),
        overlap=chunks.overlap,
    )
    return dx, dbias


IMPLEMENTATION = Implementation(
    operator="bias_gelu",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=(*WALK.specimens, *(source(t) for t in TYPES)),
    idea="one 16-byte vector a thread; the bias's gradient by chunks of rows",
)
