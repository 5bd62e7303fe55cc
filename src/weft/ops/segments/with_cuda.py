"""Sums and scans of segments in CUDA C++; see segmented_sum.cu and segmented_cumsum.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.backends.nvrtc import CudaSource
from weft.core import BACKWARD, Implementation
from weft.machine.device_limits import num_sms
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, contiguous_like, dtype_name, view_2d
from weft.ops._common.tile_scan import (
    AHEAD,
    BLOCKS_AN_SM,
    LEAST_DELAY,
    UNALIGNED_ELEMENTS,
    best_delay,
    count_words,
    slots,
    vec_width,
)
from weft.ops.segments.spec import sum_backward

HERE = Path(__file__).parent
THREADS = 256
TILE = 16384  # elements: a longer segment is cut into the tiles that it meets
THREAD_BYTES = 64  # of a row in each thread of a scan
SUM_BLOCKS_AN_SM = 8  # that take tiles; those beyond the ones that fit find nothing left
HEAD_START = 128  # bits before that of position 0


def most_delay(dtype: torch.dtype, vec_width: int) -> int:
    """Return the turns that a tile waits at the most: 4 in float32, where registers are left for it."""
    return 4 if dtype.itemsize == 4 and vec_width > 1 else LEAST_DELAY


@cache
def sum_source(dtype: torch.dtype, threads: int = THREADS, tile: int = TILE) -> CudaSource:
    """Return the program of the sums for one dtype and one length of tiles in elements."""
    return CudaSource(
        file=HERE / "segmented_sum.cu",
        kernels=("sum_segments", "sum_tiles", "sum_pieces"),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), ("THREADS", str(threads)), ("TILE", str(tile))),
        label=f"sum-{dtype_name(dtype)}",
    )


def scan_thread_bytes(dtype: torch.dtype, vec_width: int) -> int:
    """Return the bytes of a row in each thread of a scan."""
    # A sum beside each element, where an access has one, takes a register for each turn.
    return THREAD_BYTES if vec_width > 1 else UNALIGNED_ELEMENTS * dtype.itemsize


@cache
def scan_source(
    dtype: torch.dtype,
    vec_width: int,
    reverse: bool,
    threads: int = THREADS,
    thread_bytes: int | None = None,
    delay: int | None = None,
) -> CudaSource:
    """Return the program of the scan for one dtype, vector width in elements, direction and tile."""
    most = most_delay(dtype, vec_width)
    delay = delay or most
    waits = "" if delay == most else f"-delay-{delay}"
    numbers = {
        "VEC_WIDTH": vec_width,
        "REVERSE": int(reverse),
        "THREADS": threads,
        "THREAD_BYTES": thread_bytes or scan_thread_bytes(dtype, vec_width),
        "AHEAD": AHEAD,
        "DELAY": delay,
    }
    return CudaSource(
        file=HERE / "segmented_cumsum.cu",
        kernels=("mark_heads", "segmented_tiles"),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), *((name, str(n)) for name, n in numbers.items())),
        label=f"scan-{dtype_name(dtype)}-{vec_width}{'-reverse' if reverse else ''}{waits}",
    )


def sums(values: Tensor, offsets: Tensor, threads: int = THREADS, tile: int = TILE) -> Tensor:
    """Compute the sums with blocks of ``threads`` threads; segments above ``tile`` elements are cut."""
    n, segments = values.shape[-1], offsets.shape[0] - 1
    y = torch.empty((*values.shape[:-1], segments), dtype=values.dtype, device=values.device)
    if values.numel() == 0 or segments == 0:
        return y.zero_()
    x2d, offsets = view_2d(values), offsets.contiguous()
    rows = x2d.shape[0]
    stride = x2d.stride(0) if rows > 1 else n
    tiles = -(-n // tile)
    # Where every segment fits into a tile, the lists of long ones have no reader.
    heads, tails = torch.full((2, tiles if n > tile else 0), -1, dtype=torch.int64, device=values.device)
    program = sum_source(values.dtype, threads, tile)
    # Lanes of a segment of average length: 64 bytes for each, but two from the 32 bytes on that the memory
    # moves at once.
    mean_bytes = -(-n // segments) * values.element_size()
    needed = max(1, -(-mean_bytes // 64), min(2, mean_bytes // 16))
    lanes = min(32, 1 << (needed - 1).bit_length())
    blocks = -(-rows * segments // (threads // lanes))
    program["sum_segments"](blocks, threads, x2d, offsets, y, heads, tails, rows, segments, n, stride, lanes)
    if n > tile:
        pieces = torch.empty((rows, tiles, 2), dtype=torch.float32, device=values.device)
        blocks = min(rows * tiles, SUM_BLOCKS_AN_SM * num_sms(values.device, interpreted=2))
        program["sum_tiles"](blocks, threads, x2d, offsets, heads, tails, pieces, rows, n, stride, tiles)
        program["sum_pieces"](blocks, threads, offsets, tails, pieces, y, rows, segments, n, tiles)
    return y


def slot_memory(threads: int, tile: int, tile_bytes: int) -> int:
    """Return the bytes of shared memory of one tile: its elements, and the bits of their heads."""
    return tile_bytes + (tile + threads // 32 * HEAD_START) // 8


def scan(
    x: Tensor,
    offsets: Tensor,
    exclusive: bool = False,
    reverse: bool = False,
    threads: int = THREADS,
    thread_bytes: int | None = None,
    blocks_an_sm: int = BLOCKS_AN_SM,
    delay: int | None = None,
) -> Tensor:
    """Compute the scan with blocks of ``threads`` threads and ``thread_bytes`` of a row a thread.

    Tiles are taken by ``blocks_an_sm`` blocks for each SM, and wait ``delay`` turns for the sums before them;
    default: as many as have room.
    """
    y = contiguous_like(x)
    if x.numel() == 0:
        return y
    x2d, offsets = view_2d(x), offsets.contiguous()
    rows, columns = x2d.shape
    width = vec_width(x2d, y)
    tile = threads * (thread_bytes or scan_thread_bytes(x.dtype, width)) // x.element_size()
    tiles, row_words = count_words(columns + width - 1, tile)
    slot_bytes = slot_memory(threads, tile, tile * x.element_size())
    delay = delay or best_delay(x.device, slot_bytes, most_delay(x.dtype, width))
    program = scan_source(x.dtype, width, bool(reverse), threads, thread_bytes, delay)
    bits = torch.zeros((tiles * tile + HEAD_START) // 32, dtype=torch.int32, device=x.device)
    offset_count = offsets.shape[0]
    program["mark_heads"](-(-offset_count // threads), threads, offsets, bits, offset_count, columns)
    # Zeros mean that nothing is published yet.
    words = torch.zeros(2 + rows * row_words, dtype=torch.int64, device=x.device)
    count = rows * tiles
    blocks = min(count, blocks_an_sm * num_sms(x.device, interpreted=2))
    stride = x2d.stride(0) if rows > 1 else columns
    shared = slots(delay) * slot_bytes
    sizes = (columns, stride, tiles, row_words, count, int(exclusive))
    program["segmented_tiles"](blocks, threads + 64, x2d, bits, y, words, *sizes, shared=shared)
    return y


def backward_scan(
    grad: Tensor, offsets: Tensor, *, exclusive: bool = False, reverse: bool = False
) -> tuple[Tensor]:
    return (scan(grad, offsets, exclusive, not reverse),)


SEGMENTED_SUM = Implementation(
    operator="segmented_sum",
    backend="cuda",
    forward=sums,
    backward=sum_backward,
    delegates_to_torch=(BACKWARD,),
    aot_kernels=tuple(sum_source(dtype) for dtype in FLOAT_DTYPES),
    idea="a group of lanes for each segment; long ones are cut into tiles and added in a fixed order",
)
SEGMENTED_CUMSUM = Implementation(
    operator="segmented_cumsum",
    backend="cuda",
    forward=scan,
    backward=backward_scan,
    aot_kernels=(
        *(scan_source(dtype, 16 // dtype.itemsize, r) for dtype in FLOAT_DTYPES for r in (False, True)),
        scan_source(torch.float32, 1, False),
    ),
    idea="a scan of (head, sum) pairs in one pass, with the fixed tree of cumsum",
)
