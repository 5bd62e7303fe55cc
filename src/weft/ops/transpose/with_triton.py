"""Transpose in Triton: a program loads a tile, transposes it between its threads, and stores it."""

from __future__ import annotations

import torch

from weft.backends.triton_jit import INTERPRETED, TritonAotKernel, tl, triton
from weft.core import Implementation
from weft.ops._common.layout import view_3d
from weft.ops.transpose.spec import as_words, empty_transpose

# A tile of 8 to 16 KiB.
SIDES = {1: 128, 2: 64, 4: 64, 8: 32}  # of a tile, by the bytes of an element
WARPS = 8


@triton.jit
def transpose_tile(x_ptr, y_ptr, rows, columns, batch_stride, row_stride, across, tiles, SIDE: tl.constexpr):
    # x: (batches, rows, columns) with rows at row_stride elements; y: (batches, columns, rows) contiguous.
    # Bytes: each element read once and written once.
    number = tl.program_id(0).to(tl.int64)
    batch, tile = number // tiles, number % tiles
    row0, column0 = tile // across * SIDE, tile % across * SIDE
    i = row0 + tl.arange(0, SIDE)
    j = column0 + tl.arange(0, SIDE)
    source = x_ptr + batch * batch_stride + i[:, None] * row_stride + j[None, :]
    x = tl.load(source, mask=(i[:, None] < rows) & (j[None, :] < columns), other=0)
    target = y_ptr + batch * rows * columns + j[:, None] * rows + i[None, :]
    # The transpose goes through shared memory, so that neighbouring threads store neighbouring elements.
    tl.store(target, tl.trans(x), mask=(j[:, None] < columns) & (i[None, :] < rows))


def forward(x: torch.Tensor) -> torch.Tensor:
    y = empty_transpose(x)
    if x.numel() == 0:
        return y
    x3d = view_3d(as_words(x))
    batches, rows, columns = x3d.shape
    side = SIDES[x.element_size()]
    if INTERPRETED:  # a program takes a thousand times as long as an element
        side = max(16, min(side, triton.next_power_of_2(max(rows, columns))))
    down, across = triton.cdiv(rows, side), triton.cdiv(columns, side)
    transpose_tile[(batches * down * across,)](
        x3d,
        as_words(y),
        rows,
        columns,
        x3d.stride(0),
        x3d.stride(1),
        across,
        down * across,
        SIDE=side,
        num_warps=WARPS,
    )
    return y


def backward(grad: torch.Tensor) -> tuple[torch.Tensor]:
    return (forward(grad),)


IMPLEMENTATION = Implementation(
    operator="transpose",
    backend="triton",
    forward=forward,
    backward=backward,
    aot_kernels=tuple(
        TritonAotKernel(
            label=f"transpose-{kind}",
            kernel=transpose_tile,
            signature={
                "x_ptr": f"*{kind}",
                "y_ptr": f"*{kind}",
                "rows": "i32:16",
                "columns": "i32:16",
                "batch_stride": "i32:16",
                "row_stride": "i32:16",
                "across": "i32",
                "tiles": "i32",
                "SIDE": SIDES[size],
            },
            num_warps=WARPS,
        )
        for kind, size in (("i8", 1), ("i16", 2), ("i32", 4), ("i64", 8))
    ),
    idea="a square tile for each program, transposed by tl.trans",
)
