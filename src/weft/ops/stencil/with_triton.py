"""Five-point stencil in Triton: a program computes a tile from five overlapping loads of it.

The backward writes the grid's gradient and the coefficients' five sums of each tile in one pass; a second
kernel adds these.
"""

from __future__ import annotations

import torch

from weft.backends.triton_jit import INTERPRETED, TritonAotKernel, tl, triton
from weft.core import Implementation
from weft.ops._common.add_parts_triton import add_parts, aot_add_parts
from weft.ops._common.layout import contiguous_like, view_3d
from weft.ops.stencil.spec import POINTS

TALL, WIDE, WARPS = 16, 256, 4  # rows and columns of a tile


@triton.jit
def cell_offsets(number, rows, columns, across, tiles, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Return a tile's grid, its cells' rows (TALL, 1) and columns (1, WIDE), and which exist."""
    number = number.to(tl.int64)
    batch, tile = number // tiles, number % tiles
    i = (tile // across * TALL + tl.arange(0, TALL))[:, None]
    j = (tile % across * WIDE + tl.arange(0, WIDE))[None, :]
    return batch, i, j, (i < rows) & (j < columns)


@triton.jit
def add_term(total, cell_ptrs, offset, weight, mask):
    """Return the sum with one neighbour's term, and the neighbour; where it is missing, nothing is added."""
    neighbour = tl.load(cell_ptrs + offset, mask=mask, other=0.0).to(tl.float32)
    return total + tl.where(mask, weight, 0.0) * neighbour, neighbour


@triton.jit
def stencil_tile(
    x_ptr,
    weights_ptr,
    y_ptr,
    rows,
    columns,
    batch_stride,
    row_stride,
    across,
    tiles,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
):
    # x: (batches, rows, columns) with rows at row_stride elements; weights: (5,); y: (batches, rows, columns)
    # contiguous. Bytes: n read, of which four fifths of the loads come from the caches, and n written.
    batch, i, j, inside = cell_offsets(tl.program_id(0), rows, columns, across, tiles, TALL, WIDE)
    cells = x_ptr + batch * batch_stride + i * row_stride + j
    total = tl.load(cells, mask=inside, other=0.0).to(tl.float32) * tl.load(weights_ptr).to(tl.float32)
    north = tl.load(weights_ptr + 1).to(tl.float32)
    south = tl.load(weights_ptr + 2).to(tl.float32)
    west = tl.load(weights_ptr + 3).to(tl.float32)
    east = tl.load(weights_ptr + 4).to(tl.float32)
    total, _ = add_term(total, cells, -row_stride, north, inside & (i > 0))
    total, _ = add_term(total, cells, row_stride, south, inside & (i + 1 < rows))
    total, _ = add_term(total, cells, -1, west, inside & (j > 0))
    total, _ = add_term(total, cells, 1, east, inside & (j + 1 < columns))
    target = y_ptr + batch * rows * columns + i * columns + j
    tl.store(target, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def stencil_backward_tile(
    grad_ptr,
    x_ptr,
    weights_ptr,
    dx_ptr,
    parts_ptr,
    rows,
    columns,
    grad_batch_stride,
    grad_row_stride,
    x_batch_stride,
    x_row_stride,
    across,
    tiles,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
):
    # grad, x: (batches, rows, columns) with strides of their own; dx: contiguous; parts: (5, programs)
    # float32. The gradient's southern neighbour takes the northern coefficient, and so on.
    batch, i, j, inside = cell_offsets(tl.program_id(0), rows, columns, across, tiles, TALL, WIDE)
    cells = grad_ptr + batch * grad_batch_stride + i * grad_row_stride + j
    x = tl.load(x_ptr + batch * x_batch_stride + i * x_row_stride + j, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(cells, mask=inside, other=0.0).to(tl.float32)
    total = own * tl.load(weights_ptr).to(tl.float32)
    part = parts_ptr + tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    tl.store(part, tl.sum(tl.sum(own * x, 1), 0))
    weight = tl.load(weights_ptr + 1).to(tl.float32)
    mask = inside & (i + 1 < rows)
    total, near = add_term(total, cells, grad_row_stride, weight, mask)
    # An x without the neighbour is in no term, also where it is NaN.
    tl.store(part + programs, tl.sum(tl.sum(near * tl.where(mask, x, 0.0), 1), 0))
    weight = tl.load(weights_ptr + 2).to(tl.float32)
    mask = inside & (i > 0)
    total, near = add_term(total, cells, -grad_row_stride, weight, mask)
    tl.store(part + 2 * programs, tl.sum(tl.sum(near * tl.where(mask, x, 0.0), 1), 0))
    weight = tl.load(weights_ptr + 3).to(tl.float32)
    mask = inside & (j + 1 < columns)
    total, near = add_term(total, cells, 1, weight, mask)
    tl.store(part + 3 * programs, tl.sum(tl.sum(near * tl.where(mask, x, 0.0), 1), 0))
    weight = tl.load(weights_ptr + 4).to(tl.float32)
    mask = inside & (j > 0)
    total, near = add_term(total, cells, -1, weight, mask)
    tl.store(part + 4 * programs, tl.sum(tl.sum(near * tl.where(mask, x, 0.0), 1), 0))
    target = dx_ptr + batch * rows * columns + i * columns + j
    tl.store(target, total.to(dx_ptr.dtype.element_ty), mask=inside)


def _tiling(batches: int, rows: int, columns: int) -> tuple[dict[str, int], int, int, int]:
    """Return the sides of a tile, the number of tiles across and in a grid, and of all."""
    sides = {"TALL": TALL, "WIDE": WIDE}
    if INTERPRETED:  # small tiles, so that small grids have several
        sides = {"TALL": 8, "WIDE": min(64, triton.next_power_of_2(columns))}
    across = triton.cdiv(columns, sides["WIDE"])
    tiles = across * triton.cdiv(rows, sides["TALL"])
    return sides, across, tiles, batches * tiles


def forward(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    y = contiguous_like(x)
    if x.numel() == 0:
        return y
    x3d = view_3d(x)
    batches, rows, columns = x3d.shape
    sides, across, tiles, programs = _tiling(batches, rows, columns)
    strides = (x3d.stride(0), x3d.stride(1))
    arguments = (x3d, weights.contiguous(), y, rows, columns, *strides, across, tiles)
    stencil_tile[(programs,)](*arguments, **sides, num_warps=WARPS)
    return y


def backward(grad: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dweights = contiguous_like(x), contiguous_like(weights)
    if x.numel() == 0:
        return dx, dweights.zero_()
    grad3d, x3d = view_3d(grad), view_3d(x)
    batches, rows, columns = x3d.shape
    sides, across, tiles, programs = _tiling(batches, rows, columns)
    parts = torch.empty((POINTS, programs), dtype=torch.float32, device=x.device)
    strides = (grad3d.stride(0), grad3d.stride(1), x3d.stride(0), x3d.stride(1))
    arguments = (grad3d, x3d, weights.contiguous(), dx, parts, rows, columns, *strides, across, tiles)
    stencil_backward_tile[(programs,)](*arguments, **sides, num_warps=WARPS)
    return dx, add_parts(parts, dweights)


def _aot_kernels() -> tuple[TritonAotKernel, ...]:
    sizes = {"rows": "i32:16", "columns": "i32:16"}
    ends = {"across": "i32", "tiles": "i32", "TALL": TALL, "WIDE": WIDE}
    kernels = []
    for dtype in ("fp32", "fp16", "bf16"):
        grids = dict.fromkeys(("grad_ptr", "x_ptr", "weights_ptr", "dx_ptr", "y_ptr"), f"*{dtype}")
        forward_names, backward_names = ("x_ptr", "weights_ptr", "y_ptr"), tuple(grids)[:4]
        strides = dict.fromkeys(("batch_stride", "row_stride"), "i32:16")
        both = {f"{of}_{name}": kind for of in ("grad", "x") for name, kind in strides.items()}
        signatures = {
            stencil_tile: {**{n: grids[n] for n in forward_names}, **sizes, **strides, **ends},
            stencil_backward_tile: {
                **{n: grids[n] for n in backward_names},
                "parts_ptr": "*fp32",
                **sizes,
                **both,
                **ends,
            },
        }
        kernels += [
            TritonAotKernel(label=f"{k.__name__}-{dtype}", kernel=k, signature=s, num_warps=WARPS)
            for k, s in signatures.items()
        ]
        kernels.append(aot_add_parts(dtype))
    return tuple(kernels)


IMPLEMENTATION = Implementation(
    operator="stencil",
    backend="triton",
    forward=forward,
    backward=backward,
    aot_kernels=_aot_kernels(),
    idea="a tile for each program, five overlapping loads; sums of tiles in a fixed order",
)
