"""Stable sorting in CUDA C++ by radix sort; see sort_rows.cu (short rows) and onesweep.cu (long ones)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import BACKWARD, FORWARD, Implementation
from weft.machine.device_limits import num_sms
from weft.ops._common.layout import contiguous_like, dtype_name, view_2d
from weft.ops.sort.spec import backward

HERE = Path(__file__).parent
INFINITY = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}  # the bits of +Inf
DTYPES = (*INFINITY, torch.int32, torch.int64)
DIGITS = 256
ROW_ITEMS, ROW_THREADS = 8, (32, 64, 128, 256, 512)  # of a block that sorts a row
ROW_BYTES = 16384  # of a row's elements: more would not fit beside their indices and the counters
COUNT_BLOCKS, COUNT_UNROLL = 5, 8  # blocks that count digits for each SM, and loads of a thread at once


class Tile(NamedTuple):
    """Size of a block's tile in onesweep.cu."""

    threads: int = 384
    bytes_a_thread: int = 72  # of the larger of elements and indices
    blocks_an_sm: int = 2  # that the compiler leaves registers for
    match: bool = False  # match.any in place of eight ballots

    def items(self, dtype: torch.dtype, pairs: bool, wide: bool) -> int:
        """Return the elements of a thread."""
        index = (8 if wide else 4) if pairs else 0
        # Indices need their places too: with 18 elements a thread the registers spill.
        return min(16 if pairs else 18, self.bytes_a_thread // max(dtype.itemsize, index))


TILE = Tile()


def program_defines(dtype: torch.dtype, pairs: bool, threads: int, items: int) -> tuple[tuple[str, str], ...]:
    """Return the macros of digits.cuh."""
    numbers = {
        "KEY_BITS": 8 * dtype.itemsize,
        "INFINITY_BITS": INFINITY.get(dtype, 0),
        "PAIRS": int(pairs),
        "THREADS": threads,
        "ITEMS": items,
    }
    return tuple((name, str(value)) for name, value in numbers.items())


@cache
def rows_source(dtype: torch.dtype, pairs: bool, threads: int) -> CudaSource:
    """Return the program that sorts a row in a block of ``threads`` threads."""
    return CudaSource(
        file=HERE / "sort_rows.cu",
        kernels=("sort_rows",),
        defines=program_defines(dtype, pairs, threads, ROW_ITEMS),
        label=f"{dtype_name(dtype)}{'-pairs' if pairs else ''}-{threads}",
    )


@cache
def pass_source(dtype: torch.dtype, pairs: bool, wide: bool = False, tile: Tile = TILE) -> CudaSource:
    """Return the program for long rows; ``wide`` for rows that 28 bits do not count."""
    defines = program_defines(dtype, pairs, tile.threads, tile.items(dtype, pairs, wide))
    return CudaSource(
        file=HERE / "onesweep.cu",
        kernels=("count_digits", "sort_pass"),
        defines=(
            *defines,
            ("WIDE", str(int(wide))),
            ("BLOCKS_AN_SM", str(tile.blocks_an_sm)),
            ("MATCH", str(int(tile.match))),
        ),
        label=f"{dtype_name(dtype)}{'-pairs' if pairs else ''}{'-wide' if wide else ''}",
    )


def needs_wide(dtype: torch.dtype, columns: int) -> bool:
    """Return True if a place in a row does not fit beside the flags of FLAG_BITS bits in 32."""
    return columns >= 1 << (27 if dtype.itemsize == 8 else 28)


def row_stride(x2d: torch.Tensor) -> int:
    """Return the elements from one row to the next; a single row has any stride."""
    return x2d.stride(0) if len(x2d) > 1 else x2d.shape[1]


def _no_indices(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64, device=x.device)


def by_rows(
    x: torch.Tensor, descending: bool, pairs: bool, threads: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort rows of at most ``threads * ROW_ITEMS`` elements, a block each; ``x`` is not empty."""
    values = contiguous_like(x)
    indices = torch.empty(x.shape, dtype=torch.int64, device=x.device) if pairs else _no_indices(x)
    x2d = view_2d(x)
    rows, columns = x2d.shape
    threads = threads or next(t for t in ROW_THREADS if t * ROW_ITEMS >= columns)
    program = rows_source(x.dtype, pairs, threads)
    arguments = (x2d, values, indices, columns, row_stride(x2d), int(descending))
    program["sort_rows"](rows, threads, *arguments)
    return values, indices


def count_digits(
    program: CudaSource, x2d: torch.Tensor, descending: bool, wide: bool, threads: int
) -> torch.Tensor:
    """Return (rows, passes, 256) counts of the digits of each row's keys, from the lowest digit."""
    rows, columns = x2d.shape
    dtype = torch.int64 if wide else torch.int32
    counts = torch.zeros((rows, x2d.element_size(), DIGITS), dtype=dtype, device=x2d.device)
    blocks, step = COUNT_BLOCKS * num_sms(x2d.device, interpreted=2), COUNT_UNROLL * threads
    part_columns = max(1, -(-rows * columns // (blocks * step))) * step
    parts = -(-columns // part_columns)
    arguments = (x2d, counts, columns, row_stride(x2d), parts, part_columns, int(descending))
    program["count_digits"](rows * parts, threads, *arguments)
    return counts


def by_passes(
    x: torch.Tensor,
    descending: bool,
    pairs: bool,
    tile: Tile = TILE,
    wide: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort rows of any length by one pass over memory for each byte of an element; ``x`` is not empty."""
    x2d = view_2d(x)
    rows, columns = x2d.shape
    wide = needs_wide(x.dtype, columns) if wide is None else wide
    count_dtype = torch.int64 if wide else torch.int32
    program = pass_source(x.dtype, pairs, wide, tile)
    counts = count_digits(program, x2d, descending, wide, tile.threads)
    tiles = -(-columns // (tile.threads * tile.items(x.dtype, pairs, wide)))
    num_passes = x.element_size()
    # Zeros mean that nothing is published yet.
    words = torch.zeros((rows, tiles, DIGITS), dtype=count_dtype, device=x.device)
    tickets = torch.zeros(num_passes, dtype=torch.int64, device=x.device)
    values, between = contiguous_like(x), torch.empty(x2d.shape, dtype=x.dtype, device=x.device)
    indices = _no_indices(x)
    moved = [indices, indices]
    if pairs:
        indices = torch.empty(x.shape, dtype=torch.int64, device=x.device)
        first = torch.empty(x2d.shape, dtype=count_dtype, device=x.device)
        # The last pass writes `indices` and reads what the pass before wrote: passes are even in number, so
        # that it is never the memory that `indices` shares.
        moved = [first, indices.view(-1).view(count_dtype)[: x.numel()]]
    source, stride = x2d, row_stride(x2d)
    for number in range(num_passes):
        target = values if number % 2 else between
        tensors = (source, target, moved[1 - number % 2], moved[number % 2], indices, counts, words, tickets)
        sizes = (columns, stride, tiles, number, int(descending))
        program["sort_pass"](rows * tiles, tile.threads, *tensors, *sizes)
        source, stride = target, columns
    return values, indices


def run(x: torch.Tensor, descending: bool, pairs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sorted rows, and their indices or an empty tensor, by the method that suits the rows."""
    if not x.numel():
        return contiguous_like(x), torch.empty(x.shape, dtype=torch.int64, device=x.device)
    longest = min(ROW_THREADS[-1] * ROW_ITEMS, ROW_BYTES // x.element_size())
    return (by_rows if x.shape[-1] <= longest else by_passes)(x, descending, pairs)


def forward(x: torch.Tensor, *, descending: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return run(x, descending, pairs=True)


def forward_keys(x: torch.Tensor, *, descending: bool = False) -> torch.Tensor:
    return run(x, descending, pairs=False)[0]


def _aot_kernels(pairs: bool) -> tuple[CudaSource, ...]:
    return (
        *(rows_source(dtype, pairs, threads) for dtype in DTYPES for threads in (32, 256)),
        *(rows_source(dtype, pairs, 512) for dtype in DTYPES if dtype.itemsize < 8),
        *(pass_source(dtype, pairs) for dtype in DTYPES),
        *(pass_source(dtype, pairs, wide=True) for dtype in (torch.bfloat16, torch.int64)),
    )


SORT = Implementation(
    operator="sort",
    backend="cuda",
    forward=forward,
    backward=backward,
    delegates_to_torch=(BACKWARD,),
    aot_kernels=_aot_kernels(pairs=True),
    idea="radix sort: short rows in a block, long ones in a pass over memory for each 8 bits",
)
SORT_KEYS = Implementation(
    operator="sort_keys",
    backend="cuda",
    forward=forward_keys,
    directions=(FORWARD,),
    aot_kernels=_aot_kernels(pairs=False),
    idea="radix sort: short rows in a block, long ones in a pass over memory for each 8 bits",
)
