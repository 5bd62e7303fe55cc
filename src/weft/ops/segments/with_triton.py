"""Sums and scans of segments in Triton.

``sum_segments``: a program has a few segments, and walks along all of them until the longest ends. Scans take
a program for each row, or three launches where there are few long rows: the pairs of tiles (was there a head,
the sum since it), their scan, and the scan of each tile from the pair before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import BACKWARD, Implementation
from weft.ops._common.layout import contiguous_like, view_2d
from weft.ops.segments.spec import sum_backward

SUM_BLOCK = 2048  # elements of all segments of a program at once
BLOCK, WARPS, MIN_BLOCK = 1024, 4, 64  # elements and warps of a program that scans
SHORT_ROW = 16 * BLOCK  # elements up to which a row is never divided
MANY_ROWS = 1024  # rows from which programs that walk along whole rows fill a GPU


@triton.jit
def sum_segments(
    values_ptr, offsets_ptr, y_ptr, segments, n, stride, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr
):
    # values: (rows, n), rows at `stride` elements; offsets: (segments + 1,); y: (rows, segments).
    blocks = tl.cdiv(segments, BLOCK_S)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    segment = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    has_segment = segment < segments
    # An offset out of range, which no one checks on a GPU, must be no address.
    begin = tl.load(offsets_ptr + segment, mask=has_segment, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), n)
    end = tl.load(offsets_ptr + segment + 1, mask=has_segment, other=0)
    end = tl.minimum(tl.maximum(end, begin), n)
    longest = tl.max(tl.where(has_segment, end - begin, 0), 0)
    total = tl.zeros((BLOCK_S, BLOCK_N), tl.float32)
    for start in range(0, longest, BLOCK_N):
        at = begin[:, None] + start + tl.arange(0, BLOCK_N)[None, :]
        inside = (at < end[:, None]) & has_segment[:, None]
        total += tl.load(values_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.sum(total, 1)
    tl.store(y_ptr + row * segments + segment, y.to(y_ptr.dtype.element_ty), mask=has_segment)


@triton.jit
def join(left_head, left_sum, right_head, right_sum):
    """Return the pair of two neighbouring pieces: a head in the right one hides the left sum."""
    return left_head | right_head, tl.where(right_head != 0, right_sum, left_sum + right_sum)


@triton.jit
def load_tile(
    row_ptr, heads_ptr, tile, n, EXCLUSIVE: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr
):
    """Return a tile's heads, the elements that its outputs add, and their offsets, in memory order.

    An exclusive scan is the scan of the input shifted by one element, with 0 at heads.
    """
    at = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    heads = tl.load(heads_ptr + at, mask=at < n, other=0).to(tl.int32)
    source = at
    if EXCLUSIVE:
        source = at + 1 if REVERSE else at - 1
    inside = (source >= 0) & (source < n)
    if EXCLUSIVE:
        inside = inside & (heads == 0)
    return heads, tl.load(row_ptr + source, mask=inside, other=0.0).to(tl.float32), at


@triton.jit
def scan_rows(
    x_ptr,
    heads_ptr,
    y_ptr,
    n,
    stride,
    heads_stride,
    EXCLUSIVE: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # x: (programs, n), rows at `stride` elements; heads: bytes, rows at `heads_stride`; y: contiguous.
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(n, BLOCK)
    carry = 0.0
    lane = tl.arange(0, BLOCK)
    for i in range(tiles):
        tile = tiles - 1 - i if REVERSE else i
        heads, x, at = load_tile(
            x_ptr + row * stride, heads_ptr + row * heads_stride, tile, n, EXCLUSIVE, REVERSE, BLOCK
        )
        heads, y = tl.associative_scan((heads, x), 0, join, reverse=REVERSE)
        y = tl.where(heads != 0, y, y + carry)
        tl.store(y_ptr + row * n + at, y.to(y_ptr.dtype.element_ty), mask=at < n)
        # The last output in float32 is the sum since the last head. One that is stored was rounded.
        carry = tl.sum(tl.where(lane == (0 if REVERSE else BLOCK - 1), y, 0.0), 0)


@triton.jit
def tile_pairs(
    x_ptr,
    heads_ptr,
    sums_ptr,
    flags_ptr,
    n,
    stride,
    tiles,
    EXCLUSIVE: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # x as above; heads: (n,) bytes; sums: (rows, tiles) float32; flags: (rows, tiles) bytes.
    row = tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0).to(tl.int64) % tiles
    heads, x, _ = load_tile(x_ptr + row * stride, heads_ptr, tile, n, EXCLUSIVE, REVERSE, BLOCK)
    heads, y = tl.associative_scan((heads, x), 0, join, reverse=REVERSE)
    last = tl.arange(0, BLOCK) == (0 if REVERSE else BLOCK - 1)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.where(last, y, 0.0), 0))
    tl.store(flags_ptr + tl.program_id(0), tl.max(heads, 0).to(tl.uint8))


@triton.jit
def scan_tiles(
    x_ptr,
    heads_ptr,
    prefixes_ptr,
    y_ptr,
    n,
    stride,
    tiles,
    EXCLUSIVE: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # As above; prefixes: (rows, tiles) float32, the sums since the last head at the end of each tile.
    row = tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0).to(tl.int64) % tiles
    before = tile + 1 if REVERSE else tile - 1
    has_before = (before >= 0) & (before < tiles)
    prefix = tl.load(prefixes_ptr + row * tiles + before, mask=has_before, other=0.0)
    heads, x, at = load_tile(x_ptr + row * stride, heads_ptr, tile, n, EXCLUSIVE, REVERSE, BLOCK)
    heads, y = tl.associative_scan((heads, x), 0, join, reverse=REVERSE)
    y = tl.where(heads != 0, y, y + prefix)
    tl.store(y_ptr + row * n + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


def sums(values: Tensor, offsets: Tensor, block: int = SUM_BLOCK) -> Tensor:
    """Compute the sums with programs of ``block`` elements at once."""
    n, segments = values.shape[-1], offsets.shape[0] - 1
    y = torch.empty((*values.shape[:-1], segments), dtype=values.dtype, device=values.device)
    if values.numel() == 0 or segments == 0:
        return y.zero_()
    x2d = view_2d(values)
    rows = x2d.shape[0]
    block_n = min(block, max(4, triton.next_power_of_2(-(-n // segments))))
    block_s = block // block_n
    sum_segments[(rows * triton.cdiv(segments, block_s),)](
        x2d,
        offsets.contiguous(),
        y,
        segments,
        n,
        x2d.stride(0) if rows > 1 else n,
        BLOCK_S=block_s,
        BLOCK_N=block_n,
        num_warps=4,
    )
    return y


def scan(
    x: Tensor, offsets: Tensor, exclusive: bool = False, reverse: bool = False, block: int = BLOCK
) -> Tensor:
    """Compute the scan with programs of at most ``block`` elements."""
    y = contiguous_like(x)
    if x.numel() == 0:
        return y
    x2d = view_2d(x)
    rows, n = x2d.shape
    stride = x2d.stride(0) if rows > 1 else n
    marks = torch.zeros(n + 1, dtype=torch.uint8, device=x.device)
    marks.scatter_(0, offsets.clamp(0, n), 1)
    # A reversed scan meets a segment's last element first, which is before the next one's begin.
    heads = marks[1:] if reverse else marks[:-1]
    order = {"EXCLUSIVE": bool(exclusive), "REVERSE": bool(reverse)}
    block = min(block, max(MIN_BLOCK, triton.next_power_of_2(n)))
    shape = {"BLOCK": block, "num_warps": max(1, min(WARPS, block // 256))}
    tiles = triton.cdiv(n, block)
    if n <= SHORT_ROW // BLOCK * block or rows >= MANY_ROWS:
        scan_rows[(rows,)](x2d, heads, y, n, stride, 0, **order, **shape)
        return y
    sums = torch.empty((rows, tiles), dtype=torch.float32, device=x.device)
    flags = torch.empty((rows, tiles), dtype=torch.uint8, device=x.device)
    tile_pairs[(rows * tiles,)](x2d, heads, sums, flags, n, stride, tiles, **order, **shape)
    prefixes = torch.empty_like(sums)
    inclusive = {"EXCLUSIVE": False, "REVERSE": bool(reverse)}
    scan_rows[(rows,)](sums, flags, prefixes, tiles, tiles, tiles, **inclusive, **shape)
    scan_tiles[(rows * tiles,)](x2d, heads, prefixes, y, n, stride, tiles, **order, **shape)
    return y


def backward_scan(
    grad: Tensor, offsets: Tensor, *, exclusive: bool = False, reverse: bool = False
) -> tuple[Tensor]:
    return (scan(grad, offsets, exclusive, not reverse),)


def _sum_kernels() -> tuple[TritonAotKernel, ...]:
    return tuple(
        TritonAotKernel(
            label=f"sum_segments-{dtype}-{block_n}",
            kernel=sum_segments,
            signature={
                "values_ptr": f"*{dtype}",
                "offsets_ptr": "*i64",
                "y_ptr": f"*{dtype}",
                "segments": "i64",
                "n": "i64",
                "stride": "i64:16",
                "BLOCK_S": SUM_BLOCK // block_n,
                "BLOCK_N": block_n,
            },
            num_warps=4,
        )
        for dtype, block_n in (("fp32", 64), ("bf16", 64), ("fp32", 2048))
    )


def _scan_kernels() -> tuple[TritonAotKernel, ...]:
    kernels = []
    for dtype in ("fp32", "bf16"):
        for reverse in (False, True):
            order = {"EXCLUSIVE": False, "REVERSE": reverse, "BLOCK": BLOCK}
            label = dtype + "-reverse" * reverse
            head = {"x_ptr": f"*{dtype}", "heads_ptr": "*u8:1" if reverse else "*u8"}
            sizes = {"n": "i64:16", "stride": "i64:16"}
            signatures = {
                scan_rows: {**head, "y_ptr": f"*{dtype}", **sizes, "heads_stride": "i64", **order},
                tile_pairs: {
                    **head,
                    "sums_ptr": "*fp32",
                    "flags_ptr": "*u8",
                    **sizes,
                    "tiles": "i64",
                    **order,
                },
                scan_tiles: {
                    **head,
                    "prefixes_ptr": "*fp32",
                    "y_ptr": f"*{dtype}",
                    **sizes,
                    "tiles": "i64",
                    **order,
                },
            }
            kernels += [
                TritonAotKernel(
                    label=f"{kernel.__name__}-{label}", kernel=kernel, signature=signature, num_warps=WARPS
                )
                for kernel, signature in signatures.items()
            ]
    return tuple(kernels)


SEGMENTED_SUM = Implementation(
    operator="segmented_sum",
    backend="triton",
    forward=sums,
    backward=sum_backward,
    delegates_to_torch=(BACKWARD,),
    aot_kernels=_sum_kernels(),
    idea="a program for a few segments, which walks until the longest ends",
)
SEGMENTED_CUMSUM = Implementation(
    operator="segmented_cumsum",
    backend="triton",
    forward=scan,
    backward=backward_scan,
    aot_kernels=_scan_kernels(),
    idea="an associative scan of (head, sum) pairs; long rows in three launches",
)
