"""The product with a weight in blocks in Triton, its gradient of x, and its gradient of the values.

One kernel computes y and the gradient of x: a program has BATCH rows of x and SIDE columns of one row of
blocks (of W, or of W^T by the transposed index). It walks the concatenated columns of the row's blocks in
steps of DEPTH: a step is a part of a large block, or several small blocks side by side, so that each tl.dot
has DEPTH terms whatever the block's side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import Implementation
from weft.ops._common.layout import as_matrix
from weft.ops.block_sparse import blocks
from weft.ops.block_sparse.spec import bias_gradient, index_of

# Rows of x and depth of a step, by the bytes of an element. float32 has no tensor cores here, and its sums as
# many registers as its factors. Few rows, as in decoding, take the smallest tile of tl.dot.
BATCHES = {2: (16, 128), 4: (16, 32)}
DEPTHS = {2: 64, 4: 32}
GRADIENT_ROWS = 64  # of x and the gradient in a step of the gradient of the values


@triton.jit
def block_rows(
    x_ptr,
    values_ptr,
    starts_ptr,
    across_ptr,
    places_ptr,
    bias_ptr,
    y_ptr,
    batch,
    x_stride,
    outputs,
    columns,
    count,
    BLOCK: tl.constexpr,
    SIDE: tl.constexpr,
    BATCH: tl.constexpr,
    DEPTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    # x: (batch, columns), rows at x_stride; values: (count, BLOCK, BLOCK); y: (batch, outputs) contiguous.
    # starts: (outputs / BLOCK + 1,); across: (count,), the column of blocks of x. TRANSPOSED: places (count,)
    # names the block in values, which is read transposed, and there is no bias.
    tiles = tl.cdiv(batch, BATCH)
    tile, part = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row, first = part // (BLOCK // SIDE), part % (BLOCK // SIDE) * SIDE
    m = tile.to(tl.int64) * BATCH + tl.arange(0, BATCH)
    o = first + tl.arange(0, SIDE)
    is_m = m < batch
    # Starts that do not rise from 0 to the number of blocks must not be used as addresses.
    begin = tl.maximum(tl.load(starts_ptr + row), 0)
    end = tl.minimum(tl.load(starts_ptr + row + 1), count)
    x_at = x_ptr + m[:, None] * x_stride
    sums = tl.zeros((BATCH, SIDE), tl.float32)
    for start in range(0, (end - begin) * BLOCK, DEPTH):
        k = start + tl.arange(0, DEPTH)
        block = begin + k // BLOCK
        inside = block < end
        across = tl.load(across_ptr + block, mask=inside, other=-1)
        # A column out of range names nothing.
        inside = inside & (across >= 0) & (across < columns // BLOCK)
        # Groups of 16 columns lie side by side in memory, also where a step has several blocks.
        column = tl.max_contiguous(tl.multiple_of(across.to(tl.int64) * BLOCK + k % BLOCK, 16), 16)
        x = tl.load(x_at + column[None, :], mask=is_m[:, None] & inside[None, :], other=0.0)
        if TRANSPOSED:
            block = tl.load(places_ptr + block, mask=inside, other=0)
            inside = inside & (block >= 0) & (block < count)
            at = (block.to(tl.int64) * BLOCK + k % BLOCK)[:, None] * BLOCK + o[None, :]
        else:
            first_of_row = block.to(tl.int64) * (BLOCK * BLOCK) + k % BLOCK
            first_of_row = tl.max_contiguous(tl.multiple_of(first_of_row, 16), 16)
            at = first_of_row[:, None] + o[None, :] * BLOCK
        w = tl.load(values_ptr + at, mask=inside[:, None], other=0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    column = row * BLOCK + o
    if not TRANSPOSED:
        sums += tl.load(bias_ptr + column).to(tl.float32)[None, :]
    to = y_ptr + m[:, None] * outputs + column[None, :]
    tl.store(to, sums.to(y_ptr.dtype.element_ty), mask=is_m[:, None])


@triton.jit
def block_gradients(
    grad_ptr,
    x_ptr,
    col_ptr,
    rows_ptr,
    places_ptr,
    output_ptr,
    batch,
    grad_stride,
    x_stride,
    count,
    row_blocks,
    column_blocks,
    BLOCK: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    # output: (count, BLOCK, BLOCK). A program computes SIDE x SIDE of one block: rows of the gradient,
    # transposed, by columns of x, over all rows in one order. Blocks come in the order of the columns: the
    # programs that run at the same time read the same columns of x.
    index = tl.program_id(0)
    parts: tl.constexpr = BLOCK // SIDE
    part, at = index % (parts * parts), index // (parts * parts)
    block = tl.load(places_ptr + at)
    if (block >= 0) & (block < count):
        row, column = tl.load(rows_ptr + at).to(tl.int64), tl.load(col_ptr + block).to(tl.int64)
        is_valid = (row >= 0) & (row < row_blocks) & (column >= 0) & (column < column_blocks)
        o, i = part // parts * SIDE + tl.arange(0, SIDE), part % parts * SIDE + tl.arange(0, SIDE)
        sums = tl.zeros((SIDE, SIDE), tl.float32)
        for start in range(0, batch, ROWS):
            m = start + tl.arange(0, ROWS).to(tl.int64)
            is_m = (m < batch) & is_valid
            grad_at = grad_ptr + m[None, :] * grad_stride + (row * BLOCK + o)[:, None]
            grad = tl.load(grad_at, mask=is_m[None, :], other=0.0)
            x_at = x_ptr + m[:, None] * x_stride + (column * BLOCK + i)[None, :]
            x = tl.load(x_at, mask=is_m[:, None], other=0.0)
            sums = tl.dot(grad, x, sums, input_precision="ieee")
        to = output_ptr + (block.to(tl.int64) * BLOCK + o[:, None]) * BLOCK + i[None, :]
        tl.store(to, sums.to(output_ptr.dtype.element_ty))


def _adjacent(x2d: Tensor) -> Tensor:
    return x2d if x2d.stride(1) == 1 else x2d.contiguous()


def _side(block: int, itemsize: int) -> int:
    """Return the columns of a block that a program has: all, or of float32 at most 64."""
    return min(block, 64 if itemsize == 4 else 128)


def _launch(
    x2d: Tensor,
    values: Tensor,
    starts: Tensor,
    across: Tensor,
    places: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return the product of x (M, K) with the rows of blocks that ``starts`` and ``across`` describe."""
    count, block, _ = values.shape
    m, outputs = x2d.shape[0], (starts.shape[0] - 1) * block
    y = torch.empty((m, outputs), dtype=x2d.dtype, device=x2d.device)
    if not y.numel():
        return y
    x2d, values = _adjacent(x2d), values.contiguous()
    item = values.element_size()
    side, small, large = _side(block, item), *BATCHES[item]
    batch = small if m <= small else large
    block_rows[(triton.cdiv(m, batch) * (outputs // side),)](
        x2d,
        values,
        starts,
        across,
        across if places is None else places,
        y if bias is None else bias.contiguous(),
        y,
        m,
        x2d.stride(0),
        outputs,
        x2d.shape[1],
        count,
        BLOCK=block,
        SIDE=side,
        BATCH=batch,
        DEPTH=DEPTHS[item],
        TRANSPOSED=places is not None,
        num_warps=8 if side * batch >= 128 * 128 else 4,
        num_stages=3,
    )
    return y


def forward(x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor, bias: Tensor) -> Tensor:
    y = _launch(as_matrix(x), values, crow.contiguous(), col.contiguous(), None, bias)
    return y.view(*x.shape[:-1], bias.shape[0])


def gradient_of_values(
    grad2d: Tensor, x2d: Tensor, values: Tensor, col: Tensor, rows: Tensor, places: Tensor, row_blocks: int
) -> Tensor:
    """Return for each stored block the product of its rows of the gradient and its columns of x."""
    count, block, _ = values.shape
    output = torch.empty((count, block, block), dtype=values.dtype, device=values.device)
    if count:
        side = min(block, 64)
        grad2d, x2d = _adjacent(grad2d), _adjacent(x2d)
        block_gradients[(count * (block // side) ** 2,)](
            grad2d,
            x2d,
            col.contiguous(),
            rows,
            places,
            output,
            x2d.shape[0],
            grad2d.stride(0),
            x2d.stride(0),
            count,
            row_blocks,
            x2d.shape[1] // block,
            BLOCK=block,
            SIDE=side,
            ROWS=GRADIENT_ROWS if values.element_size() == 2 else 32,
            num_warps=4 if side > 16 else 1,
            num_stages=3,
        )
    return output


def backward(
    grad: Tensor, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    starts, rows, places = blocks.split_index(index_of(x, values, crow, col, transposed), values.shape[0])
    grad2d, x2d = as_matrix(grad), as_matrix(x)
    dx = _launch(grad2d, values, starts, rows, places, None).view(x.shape)
    dvalues = gradient_of_values(grad2d, x2d, values, col, rows, places, crow.shape[0] - 1)
    return dx, dvalues, bias_gradient(grad)


def _kernels() -> tuple[TritonAotKernel, ...]:
    kernels = []
    for dtype, item in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        element = f"*{dtype}"
        for block in blocks.SIDES:
            for transposed in (False, True):
                side, batch = _side(block, item), BATCHES[item][1]
                signature: dict[str, Any] = {
                    **dict.fromkeys(("x_ptr", "values_ptr"), element),
                    **dict.fromkeys(("starts_ptr", "across_ptr", "places_ptr"), "*i32"),
                    **dict.fromkeys(("bias_ptr", "y_ptr"), element),
                    "batch": "i32",
                    **dict.fromkeys(("x_stride", "outputs", "columns"), "i32:16"),
                    "count": "i32",
                    "BLOCK": block,
                    "SIDE": side,
                    "BATCH": batch,
                    "DEPTH": DEPTHS[item],
                    "TRANSPOSED": transposed,
                }
                label = f"block_rows-{dtype}-{block}" + "-transposed" * transposed
                warps = 8 if side * batch >= 128 * 128 else 4
                kernels.append(
                    TritonAotKernel(label=label, kernel=block_rows, signature=signature, num_warps=warps)
                )
            side = min(block, 64)
            signature = {
                **dict.fromkeys(("grad_ptr", "x_ptr"), element),
                **dict.fromkeys(("col_ptr", "rows_ptr", "places_ptr"), "*i32"),
                "output_ptr": element,
                "batch": "i32",
                **dict.fromkeys(("grad_stride", "x_stride"), "i32:16"),
                **dict.fromkeys(("count", "row_blocks", "column_blocks"), "i32"),
                "BLOCK": block,
                "SIDE": side,
                "ROWS": GRADIENT_ROWS if item == 2 else 32,
            }
            label = f"block_gradients-{dtype}-{block}"
            warps = 4 if side > 16 else 1
            kernels.append(
                TritonAotKernel(label=label, kernel=block_gradients, signature=signature, num_warps=warps)
            )
    return tuple(kernels)


IMPLEMENTATION = Implementation(
    operator="block_sparse_linear",
    backend="triton",
    forward=forward,
    backward=backward,
    aot_kernels=_kernels(),
    idea="a program walks a row of blocks; several small blocks join in one step",
)
