"""The k largest elements in CUDA C++: few by lists in registers, many by radix select; see topk.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import BACKWARD, YES, Case, Implementation, Support, WeftError, no
from weft.machine.device_limits import num_sms
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, dtype_name, max_vec_width, view_2d
from weft.ops.topk.spec import backward

THREADS = 256
MAX_K = 1024  # elements that a block sorts in shared memory, as in topk.cu
TOO_MANY = f"a block sorts at most {MAX_K} elements"
LIST = 32  # elements of a warp's list
MAX_COLUMNS = 2**32 - 1  # of lists, whose places have 32 bits
# Where radix select of 16-bit elements is faster than lists: rows of so many elements, and so many rows for
# few and for any k.
RADIX_COLUMNS, MANY_ROWS, FEW_ROWS = 4096, 1024, 32
WARP_COLUMNS = 1024  # rows up to which one warp has a row
# Radix select: rows from this length on have blocks of so many threads, and a counter for each lane.
LONG_ROW, LONG_ROW_THREADS, COPIES, LONG_ROW_COPIES = 16384, 1024, 4, 32
# A row is cut until each SM has so many blocks, into parts of so many columns at least, and so many at most:
# one warp joins the lists of a row. More parts have more first elements to insert: on an H200, 64 rows of
# 128256 in bfloat16 took 35 us in 2 parts, 37 in 4, 49 in 9 and 120 in 64.
BLOCKS, PART_COLUMNS, MAX_PARTS = 2, 8192, 64
Pair = tuple[torch.Tensor, torch.Tensor]


@cache
def source(dtype: torch.dtype, vec_width: int, warps_a_row: int, threads: int = THREADS) -> CudaSource:
    """Return the program for one dtype, the elements of a load, and the warps that read a row together."""
    numbers = {"VEC_WIDTH": vec_width, "WARPS_A_ROW": warps_a_row, "THREADS": threads, "MAX_K": MAX_K}
    is_long = threads == LONG_ROW_THREADS
    numbers |= {"COPIES": LONG_ROW_COPIES, "ROWS_ALONE": 1} if is_long else {"COPIES": COPIES}
    return CudaSource(
        file=Path(__file__).with_name("topk.cu"),
        kernels=("topk_rows",) if is_long else ("topk_rows", "topk_lists", "topk_merge"),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), *((name, str(n)) for name, n in numbers.items())),
        label=f"{dtype_name(dtype)}-{vec_width}x{warps_a_row}",
    )


def _outputs(x: torch.Tensor, k: int) -> Pair:
    values = x.new_empty((*x.shape[:-1], k))
    return values, torch.empty(values.shape, dtype=torch.int64, device=x.device)


def _stride(x2d: torch.Tensor) -> int:
    return x2d.stride(0) if len(x2d) > 1 else x2d.shape[1]


def _vec_width(x2d: torch.Tensor) -> int:
    """Return the elements of a load: 16 bytes, or one element where rows are not aligned to that."""
    wide = 16 // x2d.element_size()
    return wide if max_vec_width(x2d.shape[1], x2d) == wide else 1


def by_radix(x: torch.Tensor, k: int, largest: bool, threads: int | None = None) -> Pair:
    """Return values and indices by radix select, a block a row; ``k`` is 1 to ``MAX_K``, ``x`` not empty."""
    values, indices = _outputs(x, k)
    x2d = view_2d(x)
    rows, columns = x2d.shape
    threads = threads or (LONG_ROW_THREADS if columns >= LONG_ROW else THREADS)
    program = source(x.dtype, _vec_width(x2d), threads // 32, threads)
    program["topk_rows"](rows, threads, x2d, values, indices, columns, _stride(x2d), k, int(largest))
    return values, indices


def by_lists(
    x: torch.Tensor, k: int, largest: bool, threads: int = THREADS, parts: int | None = None
) -> Pair:
    """Return values and indices by lists in registers; ``k`` is 1 to ``LIST``, ``x`` not empty.

    A row is cut into about ``parts`` parts; None: as many as the device's SMs need.
    """
    values, indices = _outputs(x, k)
    x2d = view_2d(x)
    rows, columns = x2d.shape
    vec_width = _vec_width(x2d)
    warps = 1 if columns <= WARP_COLUMNS and parts is None else threads // 32
    if parts is None:
        needed = -(-BLOCKS * num_sms(x.device, interpreted=2) // rows)
        parts = max(1, min(needed, columns // PART_COLUMNS, MAX_PARTS))
    part_columns = -(-columns // (parts * vec_width)) * vec_width
    parts = -(-columns // part_columns)
    program = source(x.dtype, vec_width, warps, threads)
    several = parts if parts > 1 else 0  # of one part there are no lists to join
    keys, places = torch.empty((2, rows, several, k), dtype=torch.int32, device=x.device)
    stride, groups = _stride(x2d), threads // 32 // warps
    blocks = -(-rows * parts // groups)
    outputs = (x2d, values, indices, keys, places)
    program["topk_lists"](
        blocks, threads, *outputs, rows, columns, stride, k, int(largest), parts, part_columns
    )
    if several:
        blocks = -(-rows // (threads // 32))
        program["topk_merge"](blocks, threads, *outputs, rows, stride, k, parts)
    return values, indices


def select(x: torch.Tensor, k: int, largest: bool) -> Pair:
    """Return values and indices by the way that suits ``k``."""
    if k > MAX_K:
        raise WeftError("topk: k", expected=f"at most {MAX_K}", got=k, hint="use impl='torch'")
    if not k or not x.numel():
        return _outputs(x, k)
    columns = x.shape[-1]
    by = by_lists if suits_lists(k, x.numel() // columns, columns, x.dtype) else by_radix
    return by(x, k, largest)


def suits_lists(k: int, rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Return True if lists in registers are faster than radix select, as measured on an H200.

    Lists cost more for each k, and radix select of 16-bit elements has two passes of four. 64 rows of 128256
    in bfloat16 took 42 us by lists and 59 by radix with k = 8, 62 and 60 with k = 16; 4096 rows of 4096, 132
    and 97 with k = 8; one row of 128256, 52 and 55 with k = 32. In float32 lists are as fast up to k = 32.
    Shorter rows were not compared. (results/nvidia-h200/primitives-2026-11-27.txt)
    """
    if k > LIST or columns >= MAX_COLUMNS:
        return False
    if dtype.itemsize > 2 or columns < RADIX_COLUMNS or rows < FEW_ROWS:
        return True
    return k < 16 and rows < MANY_ROWS


def forward(x: torch.Tensor, *, k: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    return select(x, k, largest)


def _supports(case: Case, device: str) -> Support:
    k = case.params["k"]
    assert isinstance(k, int)
    return no(f"{TOO_MANY}; use impl='torch'") if k > MAX_K else YES


IMPLEMENTATION = Implementation(
    operator="topk",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=_supports,
    delegates_to_torch=(BACKWARD,),
    aot_kernels=tuple(
        source(dtype, vec_width, threads // 32 if warps else 1, threads)
        for dtype in FLOAT_DTYPES
        for vec_width in (16 // dtype.itemsize, 1)
        for threads, warps in ((THREADS, 0), (THREADS, 1), (LONG_ROW_THREADS, 1))
    ),
    idea="few: the best 32 in a warp's lanes, the row read once; else radix select, 8 bits a pass",
)
