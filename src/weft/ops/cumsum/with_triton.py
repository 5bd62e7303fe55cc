"""Cumulative sum in Triton: one program for each row, or three launches where there are few long rows.

With few rows, ``tile_sums`` adds up each tile of a row, ``scan_rows`` scans those sums, and ``scan_tiles``
scans each tile from the sum of the tiles before it: the input is read twice. An exclusive scan is the scan of
the input shifted by one element.
"""

from __future__ import annotations

import torch

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import Implementation
from weft.ops._common.layout import contiguous_like, view_2d

# Elements and warps of a program. With 4096 elements, equal ones were off by 1.15 times the tolerance at the
# end of a row of 3333: rounding errors of one sign in sums as large as the row's.
BLOCK, WARPS = 1024, 4
MIN_BLOCK = 64
SHORT_ROW = 16 * BLOCK  # elements up to which a row is never divided
MANY_ROWS = 1024  # rows from which programs that walk along whole rows fill a GPU


@triton.jit
def load_shifted(row_ptr, tile, n, EXCLUSIVE: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the elements that a tile's outputs add, in float32 and memory order, and their offsets."""
    at = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = at
    if EXCLUSIVE:
        source = at + 1 if REVERSE else at - 1
    x = tl.load(row_ptr + source, mask=(source >= 0) & (source < n), other=0.0)
    return x.to(tl.float32), at


@triton.jit
def scan_rows(
    x_ptr,
    y_ptr,
    n,
    stride,
    EXCLUSIVE: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # x: (programs, n), rows at `stride` elements; y: (programs, n) contiguous. Bytes: n read, n written.
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(n, BLOCK)
    carry = tl.zeros((1,), tl.float64)  # one addition for a tile costs nothing, and keeps the error small
    for i in range(tiles):
        tile = tiles - 1 - i if REVERSE else i
        x, at = load_shifted(x_ptr + row * stride, tile, n, EXCLUSIVE, REVERSE, BLOCK)
        y = tl.cumsum(x, 0, reverse=REVERSE) + carry.to(tl.float32)
        tl.store(y_ptr + row * n + at, y.to(y_ptr.dtype.element_ty), mask=at < n)
        carry += tl.sum(x, 0).to(tl.float64)


@triton.jit
def tile_sums(x_ptr, sums_ptr, n, stride, tiles, BLOCK: tl.constexpr):
    # x: (rows, n), rows at `stride` elements; sums: (rows, tiles) float32. A program for each tile.
    row = tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0).to(tl.int64) % tiles
    at = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(x, 0))


@triton.jit
def scan_tiles(
    x_ptr,
    before_ptr,
    y_ptr,
    n,
    stride,
    tiles,
    EXCLUSIVE: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # x, y as in scan_rows; before: (rows, tiles) float32, the exclusive scan of the tiles' sums. The elements
    # that a shift brings in belong to the neighbour's sum: only their order of addition differs.
    row = tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0).to(tl.int64) % tiles
    before = tl.load(before_ptr + tl.program_id(0))
    at = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < n, other=0.0).to(tl.float32)
    if EXCLUSIVE:
        # The tile's own first output is `before`: elements are shifted within the tile alone.
        source = at + 1 if REVERSE else at - 1
        inside = (source >= tile * BLOCK) & (source < (tile + 1) * BLOCK) & (source < n)
        x = tl.load(x_ptr + row * stride + source, mask=inside, other=0.0).to(tl.float32)
    y = tl.cumsum(x, 0, reverse=REVERSE) + before
    tl.store(y_ptr + row * n + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


def scan(x: torch.Tensor, exclusive: bool, reverse: bool, block: int = BLOCK) -> torch.Tensor:
    """Compute the cumulative sum with programs of at most ``block`` elements."""
    y = contiguous_like(x)
    if x.numel() == 0:
        return y
    x2d = view_2d(x)
    rows, n = x2d.shape
    stride = x2d.stride(0) if rows > 1 else n
    order = {"EXCLUSIVE": bool(exclusive), "REVERSE": bool(reverse)}
    block = min(block, max(MIN_BLOCK, triton.next_power_of_2(n)))
    tiles = triton.cdiv(n, block)
    if n <= SHORT_ROW // BLOCK * block or rows >= MANY_ROWS:
        scan_rows[(rows,)](x2d, y, n, stride, **order, BLOCK=block, num_warps=_warps(block))
        return y
    sums = torch.empty((rows, tiles), dtype=torch.float32, device=x.device)
    tile_sums[(rows * tiles,)](x2d, sums, n, stride, tiles, BLOCK=block, num_warps=_warps(block))
    before = torch.empty_like(sums)
    scan_rows[(rows,)](
        sums,
        before,
        tiles,
        tiles,
        EXCLUSIVE=True,
        REVERSE=bool(reverse),
        BLOCK=block,
        num_warps=_warps(block),
    )
    scan_tiles[(rows * tiles,)](
        x2d, before, y, n, stride, tiles, **order, BLOCK=block, num_warps=_warps(block)
    )
    return y


def _warps(block: int) -> int:
    return max(1, min(WARPS, block // 256))


def forward(x: torch.Tensor, *, exclusive: bool = False, reverse: bool = False) -> torch.Tensor:
    return scan(x, exclusive, reverse)


def backward(grad: torch.Tensor, *, exclusive: bool = False, reverse: bool = False) -> tuple[torch.Tensor]:
    return (scan(grad, exclusive, not reverse),)


def _aot_kernels() -> tuple[TritonAotKernel, ...]:
    kernels = []
    for dtype in ("fp32", "bf16", "fp16"):
        for exclusive, reverse in ((False, False), (False, True), (True, False)):
            order = {"EXCLUSIVE": exclusive, "REVERSE": reverse, "BLOCK": BLOCK}
            label = dtype + "-exclusive" * exclusive + "-reverse" * reverse
            tensors = {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}"}
            sizes = {"n": "i64:16", "stride": "i64:16"}
            kernels += [
                TritonAotKernel(
                    label=f"scan_rows-{label}",
                    kernel=scan_rows,
                    signature={**tensors, **sizes, **order},
                    num_warps=WARPS,
                ),
                TritonAotKernel(
                    label=f"scan_tiles-{label}",
                    kernel=scan_tiles,
                    signature={**tensors, "before_ptr": "*fp32", **sizes, "tiles": "i64", **order},
                    num_warps=WARPS,
                ),
            ]
        kernels.append(
            TritonAotKernel(
                label=f"tile_sums-{dtype}",
                kernel=tile_sums,
                signature={
                    "x_ptr": f"*{dtype}",
                    "sums_ptr": "*fp32",
                    "n": "i64:16",
                    "stride": "i64:16",
                    "tiles": "i64",
                    "BLOCK": BLOCK,
                },
                num_warps=WARPS,
            )
        )
    return tuple(kernels)


IMPLEMENTATION = Implementation(
    operator="cumsum",
    backend="triton",
    forward=forward,
    backward=backward,
    aot_kernels=_aot_kernels(),
    idea="a program for each row; long rows in three launches, reduce then scan",
)
