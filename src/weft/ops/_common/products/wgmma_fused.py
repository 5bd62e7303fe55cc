"""Products of Hopper's tensor cores whose epilogues are parts of a backward or of a loss (wgmma.cu).

A product times GELU's slope with its column sums; exponentials of logits with the sums of rows; a product
with rows scaled; a sum of products. Operands are half types with rows at multiples of 16 bytes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from weft.backends.nvrtc import CudaSource
from weft.ops._common.hopper import tensor_map
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops._common.products import wgmma
from weft.ops._common.products.wgmma import EndArguments
from weft.ops._common.products.wgmma_model import ROWS, Config, Epilogue

ADDS, ROUNDS = 1, 2  # phases of ACCUMULATE
SUMMED_ROWS = 16  # of c, in one column sum that the product's kernel stores
COLUMN_THREADS, COLUMN_LANES = 1024, 32  # of a block of add_column_sums; columns of it
SPLIT_BYTES = 50 << 20  # of partial products, at most


class ColumnArguments(ctypes.Structure):
    """``ColumnArguments`` of add_column_sums.cu."""

    _fields_ = (
        ("partials", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_longlong),
        ("columns", ctypes.c_longlong),
    )


@cache
def columns_source(dtype: torch.dtype) -> CudaSource:
    """Return the program that adds the column sums of a product with SLOPE."""
    return CudaSource(
        file=Path(__file__).with_name("add_column_sums.cu"),
        kernels=("add_column_sums",),
        defines=(("WEFT_T", CUDA_TYPES[dtype]),),
        label=f"add_column_sums-{dtype_name(dtype)}",
    )


def fits(a: torch.Tensor, b: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return True if the kernels take a (M, K) @ b (K, N) and other matrices (M, N) as they are stored."""
    return (
        a.dtype in wgmma.DTYPES
        and all(0 not in x.shape and tensor_map.fits(x) for x in (a, b, *others))
        and b.shape[1] * b.element_size() % 16 == 0
    )


def slope(dy: torch.Tensor, weight: torch.Tensor, pre: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dpre = (dy weight) * gelu'(pre), (M, N), and the sums of its columns, not rounded before, (N,).

    dy is (M, K), weight (K, N), pre (M, N); see :func:`fits`. Sixteen rows are added in the product's kernel,
    and their sums by a second one, in a fixed order.
    """
    config, _ = wgmma.choose(dy, weight, Epilogue.SLOPE, may_split=False)
    return slope_with(config, dy, weight, pre)


def slope_with(
    config: Config, dy: torch.Tensor, weight: torch.Tensor, pre: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of :func:`slope` by one configuration."""
    m, n = pre.shape
    count = -(-m // SUMMED_ROWS)
    partials = torch.empty(count, n, dtype=torch.float32, device=dy.device)
    operands, end = wgmma.plan(dy, weight), EndArguments(memory=partials)
    dpre = wgmma.multiply(config, dy, weight, 1, Epilogue.SLOPE, None, pre, operands, end)
    sums = dy.new_empty(n)
    arguments = ColumnArguments(partials.data_ptr(), sums.data_ptr(), count, n)
    columns_source(dy.dtype)["add_column_sums"](-(-n // COLUMN_LANES), COLUMN_THREADS, arguments)
    return dpre, sums


class Exponentials(NamedTuple):
    """``values`` (M, N) = exp(a b - references), and for each row and tile of columns a maximum and a total.

    ``sums`` (M, tiles, 2), float32: the largest element of a b, and the sum of the exponentials before they
    are rounded.
    """

    values: torch.Tensor
    sums: torch.Tensor


def exponentials(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    references: torch.Tensor,
    out: Exponentials,
    condition: torch.Tensor | None = None,
    farthest: float = 0.0,
) -> None:
    """Write exp(a (M, K) @ b (K, N) - references (M,)) and the sums of its rows to ``out``.

    A row with a reference of +inf becomes 0, whatever it contains. With ``condition``, one int32, nothing is
    written if it is 0. With ``farthest``, too, the condition becomes 1 if an element of a b is further than
    that above its row's reference. N may be any number: the rows of ``out.values`` begin at multiples of 16
    bytes, and up to 7 elements behind a row's end become 0, because the copy engine writes whole 16 bytes.
    """
    end = EndArguments(out.values, out.sums, references, condition, farthest=farthest)
    wgmma.multiply(config, a, b, 1, Epilogue.EXPONENTIAL, None, None, wgmma.plan(a, b), end)


def column_tiles(config: Config, columns: int) -> int:
    """Return the number of tiles of so many columns, each of which stores its own sums of rows."""
    return -(-columns // config.columns)


def scaled_rows(
    a: torch.Tensor, b: torch.Tensor, factors: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return factors (M,) times the rows of a (M, K) @ b (K, N), rounded once, in ``out`` if given."""
    config, splits = wgmma.choose(a, b, Epilogue.ROW_SCALE)
    splits = max(1, min(splits, SPLIT_BYTES // (4 * a.shape[0] * b.shape[1])))
    return scaled_rows_with(config, splits, a, b, factors, out)


def scaled_rows_with(
    config: Config,
    splits: int,
    a: torch.Tensor,
    b: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of :func:`scaled_rows` by one configuration and so many parts of K."""
    end = EndArguments(c=out, row_values=factors)
    return wgmma.multiply(config, a, b, splits, Epilogue.ROW_SCALE, None, None, wgmma.plan(a, b), end)  # type: ignore[no-any-return]


class ProductSum:
    """Sum of products in bfloat16, rounded once to bfloat16 at the end: a b of the first call, plus the next.

    Between the calls the sum has 24 bits: 16 stand in the result's memory, 8 in a byte for each element (in
    the order in which the kernel's threads have them). So a call reads and writes 6 bytes of an element; a
    sum in float32 would read and write 8 and take four times the memory.
    """

    def __init__(self, config: Config, out: torch.Tensor) -> None:
        """``out`` (M, N) is contiguous; all calls are of this configuration."""
        rows, columns = (-(-size // tile) * tile for size, tile in zip(out.shape, (ROWS, 128), strict=True))
        self.config, self.out = config, out
        self.low = torch.empty(rows * columns, dtype=torch.uint8, device=out.device)
        self.is_empty = True

    def add(self, a: torch.Tensor, b: torch.Tensor, *, is_last: bool) -> None:
        """Add a (M, K) @ b (K, N); after the last call ``out`` is the result."""
        phase = ADDS * (not self.is_empty) + ROUNDS * is_last
        end = EndArguments(self.out, self.low, phase=phase)
        operands = wgmma.plan(a, b)
        wgmma.multiply(self.config, a, b, 1, Epilogue.ACCUMULATE, None, self.out, operands, end)
        self.is_empty = False
