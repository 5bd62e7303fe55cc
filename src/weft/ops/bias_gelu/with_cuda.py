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
    registers. ``overlap``: the kernel that adds the chunks' sums is launched before they are there,
    and waits for them.
    """

    rows: int = 256
    warps: int = 16
    groups: int = 16
    ahead: int = 2
    blocks: int = 2
    overlap: bool = True


SHIPPED = Chunks()


def candidates() -> list[Chunks]:
    """The blocks worth timing, in the order of promise."""
    low = replace(SHIPPED, rows=128, warps=8, groups=8, blocks=4)
    side = replace(low, groups=4)  # two warps side by side: 1 KiB of a row in bf16
    small = replace(low, warps=4, groups=4, blocks=8)
    return [
        SHIPPED,
        replace(SHIPPED, overlap=False),
        replace(SHIPPED, rows=192, warps=12, groups=12, ahead=3),
        replace(low, ahead=3, blocks=3),
        low,
        side,
        replace(small, rows=64),
        small,
        replace(low, rows=64),
        replace(low, rows=256),
        replace(low, ahead=1, blocks=5),
        replace(low, ahead=1, blocks=5, rows=256),
        replace(side, ahead=1, blocks=5),
        replace(low, groups=2, rows=64),
        replace(small, groups=1, rows=32),
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
        *(-(-columns // 32), 1024, partial, dbias, parts, columns), overlap=chunks.overlap
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
