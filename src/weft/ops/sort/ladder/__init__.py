"""CUDA ladder of ``sort_keys``, naive to best: one idea for each step, each step an implementation.

The last steps are the implementation ``cuda`` (with_cuda.py): a radix sort in a block for short rows, and
one launch for each digit, with decoupled look-back, for long ones.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, YES, Case, Implementation, Support, WeftError, no
from weft.ops._common.layout import contiguous_like, dtype_name, view_2d
from weft.ops.sort.with_cuda import DIGITS, DTYPES, program_defines, row_stride

HERE = Path(__file__).parent
THREADS, ITEMS = 256, 8
MAX_BITONIC = 2048  # keys and places of a row in shared memory
TOO_LONG = f"a block has rows of at most {MAX_BITONIC} elements in shared memory"


@cache
def bitonic_source(dtype: torch.dtype, threads: int, size: int) -> CudaSource:
    """Return the program of step 1 for rows of up to ``size`` elements, a power of two."""
    return CudaSource(
        file=HERE / "01_bitonic.cu",
        kernels=("bitonic",),
        defines=(*program_defines(dtype, False, threads, 1), ("SIZE", str(size))),
        label=f"01_bitonic-{dtype_name(dtype)}-{size}",
    )


@cache
def passes_source(dtype: torch.dtype, exchange: bool, threads: int = THREADS) -> CudaSource:
    """Return the program of step 2, or of step 3, which exchanges elements in shared memory."""
    return CudaSource(
        file=HERE / "02_separate_scan.cu",
        kernels=("count_tiles", "scan_counts", "move_tiles"),
        defines=(*program_defines(dtype, False, threads, ITEMS), ("EXCHANGE", str(int(exchange)))),
        label=f"{'03_exchange' if exchange else '02_separate_scan'}-{dtype_name(dtype)}",
    )


def by_bitonic(x: torch.Tensor, descending: bool, threads: int = THREADS) -> torch.Tensor:
    """Sort rows of at most ``MAX_BITONIC`` elements by a network in a block."""
    y = contiguous_like(x)
    if x.shape[-1] > MAX_BITONIC:
        hint = "use impl='cuda'"
        raise WeftError("sort_keys: columns", expected=f"at most {MAX_BITONIC}", got=x.shape[-1], hint=hint)
    if x.numel():
        x2d = view_2d(x)
        rows, columns = x2d.shape
        size = max(2, 1 << (columns - 1).bit_length())
        program = bitonic_source(x.dtype, threads, size)
        program["bitonic"](rows, threads, x2d, y, columns, row_stride(x2d), int(descending))
    return y


def by_separate_scan(
    x: torch.Tensor, descending: bool, exchange: bool, threads: int = THREADS
) -> torch.Tensor:
    """Sort rows by three launches for each digit."""
    y = contiguous_like(x)
    if not x.numel():
        return y
    source = view_2d(x)
    rows, columns = source.shape
    stride, tiles = row_stride(source), -(-columns // (threads * ITEMS))
    between = torch.empty(source.shape, dtype=x.dtype, device=x.device)
    counts = torch.empty((rows, DIGITS, tiles), dtype=torch.int64, device=x.device)
    program = passes_source(x.dtype, exchange, threads)
    for number in range(x.element_size()):
        target = y if number % 2 else between
        sizes = (columns, stride, tiles, 8 * number, int(descending))
        program["count_tiles"](rows * tiles, threads, source, counts, *sizes)
        program["scan_counts"](rows, threads, counts, tiles)
        program["move_tiles"](rows * tiles, threads, source, target, counts, *sizes)
        source, stride = target, columns
    return y


def _bitonic(x: torch.Tensor, *, descending: bool = False) -> torch.Tensor:
    return by_bitonic(x, descending)


def _separate_scan(x: torch.Tensor, *, descending: bool = False) -> torch.Tensor:
    return by_separate_scan(x, descending, exchange=False)


def _exchange(x: torch.Tensor, *, descending: bool = False) -> torch.Tensor:
    return by_separate_scan(x, descending, exchange=True)


def _supports_bitonic(case: Case, device: str) -> Support:
    shape = case.inputs[0].shape
    return no(f"{TOO_LONG}; use impl='cuda'") if shape and shape[-1] > MAX_BITONIC else YES


BITONIC = Implementation(
    operator="sort_keys",
    name="cuda/01-bitonic",
    backend="cuda",
    forward=_bitonic,
    directions=(FORWARD,),
    supports=_supports_bitonic,
    aot_kernels=tuple(bitonic_source(dtype, THREADS, MAX_BITONIC) for dtype in DTYPES),
    idea="a bitonic network over a row in shared memory, a barrier a round",
)
SEPARATE_SCAN = Implementation(
    operator="sort_keys",
    name="cuda/02-separate-scan",
    backend="cuda",
    forward=_separate_scan,
    directions=(FORWARD,),
    aot_kernels=tuple(passes_source(dtype, False) for dtype in DTYPES),
    idea="radix sort, three launches a digit: count tiles, scan the counts, move: n read twice a digit",
)
EXCHANGE = Implementation(
    operator="sort_keys",
    name="cuda/03-exchange",
    backend="cuda",
    forward=_exchange,
    directions=(FORWARD,),
    aot_kernels=tuple(passes_source(dtype, True) for dtype in DTYPES),
    idea="elements of one digit meet in shared memory, and are stored side by side",
)
