"""2:4 sparsity in CUDA C++: sparse24.cu prunes and expands, transposable.cu prunes both orientations."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, Implementation
from weft.ops._common.layout import FLOAT_DTYPES, dtype_name
from weft.ops.sparse24 import pattern
from weft.ops.sparse24.pattern import GROUP, NONZEROS, WORD_COLUMNS

HERE = Path(__file__).parent
THREADS, WORDS = 256, 32
SIDE = 64  # rows and columns of a block of transposable.cu
ELEMENTS = {4: "unsigned", 2: "unsigned short"}


@cache
def source(file: str, dtype: torch.dtype, wide: bool) -> CudaSource:
    """Return a program; ``wide``: rows are whole words of metadata at multiples of 16 bytes."""
    kernels = {
        "sparse24.cu": ("prune_words", "expand_words", "compress_words"),
        "transposable.cu": ("prune_tiles",),
    }
    return CudaSource(
        file=HERE / file,
        kernels=kernels[file],
        defines=(
            ("ELEMENT", ELEMENTS[dtype.itemsize]),
            ("INFINITY_BITS", hex(pattern.INFINITY[dtype])),
            ("WIDE", str(int(wide))),
        ),
        label=f"{file.removesuffix('.cu')}-{dtype_name(dtype)}" + "-wide" * wide,
    )


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """Return a matrix with adjacent columns, and the elements from a row to the next."""
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _is_wide(columns: int, stride: int, *tensors: Tensor) -> bool:
    """Return True if rows of ``columns`` columns, and of half as many, are read in vectors of 16 bytes."""
    aligned = all(t.data_ptr() % 16 == 0 for t in tensors)
    return columns % WORD_COLUMNS == 0 and aligned and stride * tensors[0].element_size() % 16 == 0


def _new_pair(w: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    shape = pattern.metadata_shape(rows, columns)
    values = torch.empty((rows, columns // NONZEROS), dtype=w.dtype, device=w.device)
    return values, torch.empty(shape, dtype=torch.int32, device=w.device)


def prune(w: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = w.shape
    values, metadata = _new_pair(w, rows, columns)
    if metadata.numel():
        w, stride = _rows(w)
        blocks, row_blocks, _ = metadata.shape
        program = source("sparse24.cu", w.dtype, _is_wide(columns, stride, w, values))
        grid = -(-blocks * row_blocks * WORDS // THREADS)
        sizes = (rows, columns, stride, row_blocks, blocks)
        program["prune_words"](grid, THREADS, w, values, metadata, *sizes)
    return values, metadata


def expand(values: Tensor, metadata: Tensor) -> Tensor:
    rows, columns = values.shape[0], values.shape[1] * GROUP // NONZEROS
    w = torch.empty((rows, columns), dtype=values.dtype, device=values.device)
    if w.numel():
        values, stride = _rows(values)
        metadata = metadata.contiguous()
        blocks, row_blocks, _ = metadata.shape
        program = source("sparse24.cu", w.dtype, _is_wide(columns, stride, values, w))
        grid = -(-blocks * row_blocks * WORDS // THREADS)
        sizes = (rows, columns, stride, row_blocks, blocks)
        program["expand_words"](grid, THREADS, values, metadata, w, *sizes)
    return w


def compress(w: Tensor, metadata: Tensor) -> Tensor:
    """Return the elements of a matrix that the metadata names, (rows, columns / 2)."""
    rows, columns = w.shape
    values = torch.empty((rows, columns // NONZEROS), dtype=w.dtype, device=w.device)
    if values.numel():
        w, stride = _rows(w)
        metadata = metadata.contiguous()
        blocks, row_blocks, _ = metadata.shape
        program = source("sparse24.cu", w.dtype, _is_wide(columns, stride, w, values))
        grid = -(-blocks * row_blocks * WORDS // THREADS)
        sizes = (rows, columns, stride, row_blocks, blocks)
        program["compress_words"](grid, THREADS, w, metadata, values, *sizes)
    return values


def _prune_backward(grad: Tensor, metadata: Tensor) -> tuple[Tensor]:
    return (expand(grad, metadata),)


def _expand_backward(grad: Tensor, metadata: Tensor) -> tuple[Tensor]:
    return (compress(grad, metadata),)


def prune_transposable(w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = w.shape
    values, metadata = _new_pair(w, rows, columns)
    values_t, metadata_t = _new_pair(w, columns, rows)
    outputs = (values, metadata, values_t, metadata_t)
    if metadata.numel() or metadata_t.numel():
        w, stride = _rows(w)
        # Padded to 128 in both directions, as the metadata is.
        down, across = (2 * -(-size // (2 * SIDE)) for size in (rows, columns))
        wide = rows % WORD_COLUMNS == 0 and _is_wide(columns, stride, w, values, values_t)
        program = source("transposable.cu", w.dtype, wide)
        program["prune_tiles"](down * across, THREADS, w, *outputs, rows, columns, stride, across)
    return outputs


def _sources(file: str) -> tuple[CudaSource, ...]:
    return tuple(source(file, dtype, wide) for dtype in FLOAT_DTYPES for wide in (True, False))


PRUNE_2_4 = Implementation(
    operator="prune_2_4",
    backend="cuda",
    forward=prune,
    backward=_prune_backward,
    aot_kernels=_sources("sparse24.cu"),
    idea="a thread a word of metadata: 16 columns of two rows",
)
EXPAND_2_4 = Implementation(
    operator="expand_2_4",
    backend="cuda",
    forward=expand,
    backward=_expand_backward,
    aot_kernels=_sources("sparse24.cu"),
    idea="a thread a word of metadata: 16 columns of two rows",
)
PRUNE_2_4_TRANSPOSABLE = Implementation(
    operator="prune_2_4_transposable",
    backend="cuda",
    forward=prune_transposable,
    directions=(FORWARD,),
    aot_kernels=_sources("transposable.cu"),
    idea="a thread a tile of 4 x 4, both orientations through shared memory",
)
