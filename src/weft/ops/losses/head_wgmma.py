"""The LM head and its loss by Hopper's tensor cores: no pass over the logits between the products.

For a chunk of rows the first product writes E = exp(logits - r) in bfloat16, r a number for each row, and the
sums of E's rows. From these follow the losses and a factor s for each row, so that s E is the softmax:

    dx = s (E W) - W[target]        dW = E^T (s x) - (x at its target's row)

The last terms are part of E: its element at the target is changed to (p - 1) / s. E is written once and read
twice; logits and softmax are never stored. See head_wgmma.cu for r, and for logits that are far from it.

The sum of dW over the chunks has 24 bits, 16 of which stand in the result's memory.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from weft.backends.nvrtc import CudaSource
from weft.machine.device_limits import has_wgmma
from weft.ops._common.hopper import tensor_map
from weft.ops._common.layout import CUDA_TYPES
from weft.ops._common.products import wgmma, wgmma_fused
from weft.ops._common.products.wgmma_fused import Exponentials, ProductSum
from weft.ops._common.products.wgmma_model import ROWS, Config, Epilogue
from weft.ops.losses.spec import LossOptions

DTYPE = torch.bfloat16  # E needs its range
LEAST = 64  # rows, and columns: of fewer the products are not worth a tile
MULTIPLE = 8  # elements in 16 bytes
PADDING = 64  # columns of E's rows: 128 bytes
CHUNK_BYTES = 200 << 20
THREADS, WARPS = 256, 8  # of a block; a warp has a row
# exp(40) times a vocabulary is far from the largest float32; exp(-40) of the largest is next to nothing.
FARTHEST = 40.0
KERNELS = ("head_references", "head_check", "head_finish")


class ReferenceArguments(ctypes.Structure):
    """``ReferenceArguments`` of head_wgmma.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "targets", "target_logits", "references")),
        ("conditions", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("rows", "inner", "columns", "x_stride", "weight_stride")),
        *((name, ctypes.c_longlong) for name in ("ignore_index", "chunk_rows")),
    )


class RowArguments(ctypes.Structure):
    """``RowArguments`` of head_wgmma.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sums", "references", "target_logits", "targets", "losses")),
        *((name, ctypes.c_void_p) for name in ("factors", "x", "scaled", "exponentials", "condition")),
        *((name, ctypes.c_longlong) for name in ("rows", "tiles", "inner", "x_stride", "pitch", "columns")),
        ("ignore_index", ctypes.c_longlong),
        ("z_loss", ctypes.c_float),
        ("farthest", ctypes.c_float),
    )


@cache
def source() -> CudaSource:
    """Return the program of the passes between the products."""
    return CudaSource(
        file=Path(__file__).with_name("head_wgmma.cu"),
        kernels=KERNELS,
        defines=(("WEFT_T", CUDA_TYPES[DTYPE]),),
        label="head_wgmma-bf16",
    )


def supports(x: torch.Tensor, weight: torch.Tensor, options: LossOptions) -> bool:
    """Return True if :func:`forward` takes these arguments: bfloat16 on Hopper, without label smoothing."""
    return (
        x.dtype == DTYPE
        and options.label_smoothing == 0
        and x.shape[0] >= LEAST
        and weight.shape[0] >= LEAST
        and x.shape[1] > 0
        and x.shape[1] % MULTIPLE == 0
        and tensor_map.fits(weight)
        and weight.stride(1) == 1
        and has_wgmma(x.device)
    )


def chunk_rows(rows: int, inner: int, columns: int) -> int:
    """Return the rows of a chunk: CHUNK_BYTES of E, or where W is large 3/4 of a byte for each element of W.

    A multiple of whole tiles, unless it is all rows; no chunk has a single row.
    """
    pitch = -(-columns // PADDING) * PADDING
    budget = max(CHUNK_BYTES, columns * inner * 3 // 4)
    most = max(ROWS, budget // (pitch * DTYPE.itemsize) // ROWS * ROWS)
    chunks = -(-rows // most)
    size = min(rows, -(-rows // chunks // ROWS) * ROWS)
    while rows % size == 1:  # a matrix of one row has no order of storage
        size += ROWS
    return size


def _config(a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue) -> Config:
    return wgmma.choose(a, b, epilogue, may_split=False)[0]


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    options: LossOptions,
    size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (sum of the losses, dx, dweight) of that sum; see :func:`supports`.

    ``targets`` are contiguous. ``size``: rows of a chunk; None for those of :func:`chunk_rows`.
    """
    (rows, inner), columns = x.shape, weight.shape[0]
    if not tensor_map.fits(x) or x.stride(1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    size = size or chunk_rows(rows, inner, columns)
    losses, references, target_logits = (
        torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(3)
    )
    dx, dweight = x.new_empty(rows, inner), x.new_empty(columns, inner)
    conditions = torch.zeros(-(-rows // size), dtype=torch.int32, device=x.device)
    buffer = x.new_empty(size, -(-columns // PADDING) * PADDING)
    scaled, factors = x.new_empty(size, inner), losses.new_empty(size)
    config = _config(x[:size], weight.t(), Epilogue.EXPONENTIAL)
    sums = losses.new_empty(size, wgmma_fused.column_tiles(config, columns), 2)
    values = buffer[:, :columns]
    total = ProductSum(_config(values.t(), scaled, Epilogue.ACCUMULATE), dweight)
    program = source()
    arguments: Any = ReferenceArguments(
        *(t.data_ptr() for t in (x, weight, targets, target_logits, references, conditions)),
        *(rows, inner, columns, x.stride(0), weight.stride(0), options.ignore_index, size),
    )
    program["head_references"](-(-rows // WARPS), THREADS, arguments)
    for number, start in enumerate(range(0, rows, size)):
        end = min(rows, start + size)
        count, part = end - start, slice(start, end)
        out, condition = Exponentials(values[:count], sums[:count]), conditions[number : number + 1]
        pointers = (sums, references[part], target_logits[part], targets[part], losses[part], factors)
        arguments = RowArguments(
            *(t.data_ptr() for t in (*pointers, x[part], scaled, buffer, condition)),
            *(count, sums.shape[1], inner, x.stride(0), buffer.stride(0), columns, options.ignore_index),
            *(float(options.z_loss), FARTHEST),
        )
        blocks = -(-count // WARPS)
        operands = config, x[part], weight.t(), references[part], out, condition
        wgmma_fused.exponentials(*operands, farthest=FARTHEST)
        program["head_check"](blocks, THREADS, arguments, overlap=True)
        wgmma_fused.exponentials(*operands)
        program["head_finish"](blocks, THREADS, arguments, overlap=True)
        wgmma_fused.scaled_rows(out.values, weight, factors[:count], dx[part])
        total.add(out.values.t(), scaled[:count], is_last=end == rows)
    return losses.sum(), dx, dweight


def aot_kernels() -> tuple[CudaSource, ...]:
    """Return the passes, and the products at GPT-2's and Llama's sizes."""
    narrow, cooperative, pingpong = (
        Config(columns=128, stages=6, cluster=cluster, pingpong=alternates)
        for cluster, alternates in ((1, False), (2, False), (2, True))
    )
    kinds = ((Epilogue.EXPONENTIAL, (True, True)), (Epilogue.ROW_SCALE, (True, False)))
    sources = [wgmma.source(DTYPE, pingpong, *majors, False, epilogue) for epilogue, majors in kinds]
    sources.append(wgmma.source(DTYPE, pingpong, False, False, False, Epilogue.ACCUMULATE))
    sources.append(wgmma.source(DTYPE, cooperative, True, False, False, Epilogue.ROW_SCALE))
    sources.append(wgmma.source(DTYPE, narrow, True, False, True, Epilogue.ROW_SCALE))
    return (source(), *sources)
