"""Cumulative sum in CUDA C++, in one pass over memory; see cumsum.cu.

Short rows get a group of lanes each (``cumsum_rows``). A longer row is cut into tiles, which blocks take one
after another while they pass their sums to each other (``cumsum_tiles``).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.machine.device_limits import num_sms
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, contiguous_like, dtype_name, view_2d
from weft.ops._common.tile_scan import (
    AHEAD,
    BLOCKS_AN_SM,
    LEAST_DELAY,
    MOST_DELAY,
    UNALIGNED_ELEMENTS,
    best_delay,
    count_words,
    slots,
    vec_width,
)

THREADS = 256
THREAD_BYTES = 64  # of a row in each thread
MIN_LANES = 4
# Rows from which a warp for each row fills a GPU, however long the row is: 16 warps on each of 132 SMs.
MANY_ROWS = 2048


def source(
    dtype: torch.dtype,
    vec_width: int,
    reverse: bool,
    threads: int = THREADS,
    thread_bytes: int = THREAD_BYTES,
    delay: int = MOST_DELAY,
) -> CudaSource:
    """Return the program for one dtype, vector width in elements, direction, size of a tile, and delay."""
    return _source(dtype, vec_width, bool(reverse), threads, thread_bytes, delay)


@cache
def _source(
    dtype: torch.dtype, vec_width: int, reverse: bool, threads: int, thread_bytes: int, delay: int
) -> CudaSource:
    waits = "" if delay == (MOST_DELAY if vec_width > 1 else LEAST_DELAY) else f"-delay-{delay}"
    numbers = (
        ("VEC_WIDTH", vec_width),
        ("REVERSE", int(reverse)),
        ("THREADS", threads),
        ("THREAD_BYTES", thread_bytes),
        ("AHEAD", AHEAD),
        ("DELAY", delay),
    )
    return CudaSource(
        file=Path(__file__).with_name("cumsum.cu"),
        kernels=("cumsum_rows", "cumsum_tiles"),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), *((name, str(value)) for name, value in numbers)),
        label=f"{dtype_name(dtype)}-{vec_width}{'-reverse' if reverse else ''}{waits}",
    )


def scan(
    x: torch.Tensor,
    exclusive: bool,
    reverse: bool,
    threads: int = THREADS,
    thread_bytes: int = THREAD_BYTES,
    blocks_an_sm: int = BLOCKS_AN_SM,
    delay: int | None = None,
) -> torch.Tensor:
    """Compute the cumulative sum with blocks of ``threads`` threads and ``thread_bytes`` of a row a thread.

    Tiles are taken by ``blocks_an_sm`` blocks for each SM, or as many as there are tiles, and wait ``delay``
    turns for the sums before them; default: as many as have room.
    """
    y = contiguous_like(x)
    if x.numel() == 0:
        return y
    x2d = view_2d(x)
    rows, columns = x2d.shape
    width = vec_width(x2d, y)
    if width == 1:
        # A sum beside each element takes a register for each turn.
        thread_bytes = min(thread_bytes, UNALIGNED_ELEMENTS * x.element_size())
    most = MOST_DELAY if width > 1 else LEAST_DELAY
    delay = delay or best_delay(x.device, threads * thread_bytes, most)
    program = source(x.dtype, width, reverse, threads, thread_bytes, delay)
    per_thread = thread_bytes // x.element_size()
    stride = x2d.stride(0) if rows > 1 else columns
    if columns <= 32 * per_thread or (columns <= threads * per_thread and rows >= MANY_ROWS):
        lanes = min(32, max(MIN_LANES, 1 << (-(-columns // per_thread) - 1).bit_length()))
        blocks = -(-rows // (threads // lanes))
        program["cumsum_rows"](blocks, threads, x2d, y, rows, columns, stride, lanes, int(exclusive))
        return y
    tiles, row_words = count_words(columns + width - 1, threads * per_thread)
    # Zeros mean that nothing is published yet.
    words = torch.zeros(2 + rows * row_words, dtype=torch.int64, device=x.device)
    count = rows * tiles
    blocks = min(count, blocks_an_sm * num_sms(x.device, interpreted=2))
    shared = slots(delay) * threads * thread_bytes
    sizes = (columns, stride, tiles, row_words, count, int(exclusive))
    program["cumsum_tiles"](blocks, threads + 64, x2d, y, words, *sizes, shared=shared)
    return y


def forward(x: torch.Tensor, *, exclusive: bool = False, reverse: bool = False) -> torch.Tensor:
    return scan(x, exclusive, reverse)


def backward(grad: torch.Tensor, *, exclusive: bool = False, reverse: bool = False) -> tuple[torch.Tensor]:
    return (scan(grad, exclusive, not reverse),)


IMPLEMENTATION = Implementation(
    operator="cumsum",
    backend="cuda",
    forward=forward,
    backward=backward,
    aot_kernels=tuple(
        source(
            dtype,
            width,
            reverse,
            thread_bytes=THREAD_BYTES if width > 1 else UNALIGNED_ELEMENTS * dtype.itemsize,
            delay=delay,
        )
        for dtype in FLOAT_DTYPES
        for width, delay in ((16 // dtype.itemsize, MOST_DELAY), (1, LEAST_DELAY))
        for reverse in (False, True)
    ),
    idea="16-byte accesses, warp scans, sums of earlier tiles by a fixed tree",
)
