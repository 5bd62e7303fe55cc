"""2:4 sparsity in Triton: pruning and expansion by words of metadata, and a product that expands tiles.

The kernels of pruning and expansion see elements as integers of their size: magnitudes are compared by their
bits, so that no element is rounded.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import BACKWARD, Implementation
from weft.ops.sparse24 import pattern
from weft.ops.sparse24.pattern import GROUP, NONZEROS
from weft.ops.sparse24.spec import expand_backward, linear_backward

# Of a tile of the product, by the bytes of an element: rows of x, rows of the weight, columns. float32 has no
# tensor cores here, and its sums as many registers as its factors.
TILES = {2: (64, 64, 64), 4: (32, 32, 32)}
SIGNED = {4: torch.int32, 2: torch.int16}


@triton.jit
def _ahead(a, b, b_is_lower: tl.constexpr):
    # 1 where b stays rather than a: it is larger, or as large and at the lower place.
    return (b >= a).to(tl.int32) if b_is_lower else (b > a).to(tl.int32)


@triton.jit
def prune_rows(
    w_ptr,
    values_ptr,
    metadata_ptr,
    rows,
    columns,
    stride,
    row_blocks,
    INFINITY: tl.constexpr,
    MASK: tl.constexpr,
):
    # w: (rows, columns), rows at `stride` elements; values: (rows, columns / 2) contiguous; metadata as in
    # pattern.py. A program makes the 32 words of one block: word l, half h, group n of four.
    index = tl.program_id(0).to(tl.int64)
    block, row_block = index // row_blocks, index % row_blocks
    word = tl.arange(0, 32)[:, None]
    part = tl.arange(0, 8)[None, :]  # half and group: four bits each
    row = row_block * 16 + word // 4 + part // 4 * 8
    column = block * 64 + word % 4 * 16 + part % 4 * 4
    inside = (row < rows) & (column < columns)
    at = w_ptr + row * stride + column
    w0 = tl.load(at, mask=inside, other=0)
    w1 = tl.load(at + 1, mask=inside, other=0)
    w2 = tl.load(at + 2, mask=inside, other=0)
    w3 = tl.load(at + 3, mask=inside, other=0)
    # NaN, whatever its bits, is just above infinity.
    k0 = tl.minimum(w0.to(tl.int32) & MASK, INFINITY + 1)
    k1 = tl.minimum(w1.to(tl.int32) & MASK, INFINITY + 1)
    k2 = tl.minimum(w2.to(tl.int32) & MASK, INFINITY + 1)
    k3 = tl.minimum(w3.to(tl.int32) & MASK, INFINITY + 1)
    is_kept0 = _ahead(k0, k1, False) + _ahead(k0, k2, False) + _ahead(k0, k3, False) < 2
    is_kept1 = _ahead(k1, k0, True) + _ahead(k1, k2, False) + _ahead(k1, k3, False) < 2
    is_kept2 = _ahead(k2, k0, True) + _ahead(k2, k1, True) + _ahead(k2, k3, False) < 2
    # Two stay: the first is 0, 1 or 2, and the second is the last one that stays.
    first = tl.where(is_kept0, 0, tl.where(is_kept1, 1, 2))
    is_kept3 = is_kept0.to(tl.int32) + is_kept1.to(tl.int32) + is_kept2.to(tl.int32) < 2
    second = tl.where(is_kept3, 3, tl.where(is_kept2, 2, 1))
    low = tl.where(first == 0, w0, tl.where(first == 1, w1, w2))
    high = tl.where(second == 3, w3, tl.where(second == 2, w2, w1))
    to = values_ptr + row * (columns // 2) + column // 2
    tl.store(to, low, mask=inside)
    tl.store(to + 1, high, mask=inside)
    code = tl.where(inside, first + second * 4, 4)
    words = tl.sum(code << (part * 4), 1)
    tl.store(metadata_ptr + index * 32 + tl.arange(0, 32), words)


@triton.jit
def expand_rows(values_ptr, metadata_ptr, w_ptr, rows, columns, stride, row_blocks):
    # The other way: values (rows, columns / 2), rows at `stride` elements; w (rows, columns) contiguous.
    index = tl.program_id(0).to(tl.int64)
    block, row_block = index // row_blocks, index % row_blocks
    word = tl.arange(0, 32)[:, None]
    part = tl.arange(0, 8)[None, :]
    row = row_block * 16 + word // 4 + part // 4 * 8
    column = block * 64 + word % 4 * 16 + part % 4 * 4
    inside = (row < rows) & (column < columns)
    code = (tl.load(metadata_ptr + index * 32 + word) >> (part * 4)) & 15
    first, second = code & 3, code >> 2
    at = values_ptr + row * stride + column // 2
    low = tl.load(at, mask=inside, other=0)
    high = tl.load(at + 1, mask=inside, other=0)
    to = w_ptr + row * columns + column
    for i in tl.static_range(4):
        element = tl.where(first == i, low, tl.where(second == i, high, 0))
        tl.store(to + i, element, mask=inside)


@triton.jit
def linear_tiles(
    x_ptr,
    values_ptr,
    metadata_ptr,
    bias_ptr,
    y_ptr,
    batch,
    outputs,
    columns,
    x_stride,
    values_stride,
    row_blocks,
    BATCH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # y: (batch, outputs) contiguous. A program expands tiles of the weight to dense ones, (OUTPUTS, DEPTH),
    # and multiplies them from registers: it computes y^T.
    b = tl.program_id(0).to(tl.int64) * BATCH + tl.arange(0, BATCH)
    o = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    k, g = tl.arange(0, DEPTH), tl.arange(0, DEPTH // 4)  # columns, and groups of four of them
    is_b, is_o = b < batch, o < outputs
    word_of_row = (o // 16 * 32 + o % 8 * 4)[:, None]
    shift_of_row = (o % 16 // 8 * 16).to(tl.int32)[:, None]
    row_at = values_ptr + (o * values_stride)[:, None]
    sums = tl.zeros((OUTPUTS, BATCH), tl.float32)
    for start in range(0, columns, DEPTH):
        column, group = start + k, start // 4 + g
        x_mask = is_b[None, :] & (column < columns)[:, None]
        x = tl.load(x_ptr + b[None, :] * x_stride + column[:, None], mask=x_mask, other=0.0)
        inside = is_o[:, None] & (group * 4 < columns)[None, :]
        first_value = tl.load(row_at + (group * 2)[None, :], mask=inside, other=0.0)
        second_value = tl.load(row_at + (group * 2 + 1)[None, :], mask=inside, other=0.0)
        word = (group // 16 * row_blocks * 32 + group % 16 // 4)[None, :] + word_of_row
        shift = shift_of_row + (group % 4 * 4).to(tl.int32)[None, :]
        code = (tl.load(metadata_ptr + word, mask=inside, other=0) >> shift) & 15
        first, second = code & 3, code >> 2
        zero = tl.zeros_like(first_value)
        w0 = tl.where(first == 0, first_value, zero)
        w1 = tl.where(first == 1, first_value, tl.where(second == 1, second_value, zero))
        w2 = tl.where(first == 2, first_value, tl.where(second == 2, second_value, zero))
        w3 = tl.where(second == 3, second_value, zero)
        # The last dimension is that of the outer join: (0 or 2) + (0 or 1).
        weight = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (OUTPUTS, DEPTH))
        # Nothing is outside that is not 0. A reshaped tile that goes straight to the product does not compile
        # for sm_100 (Triton 3.6: an illegal layout in shared memory).
        weight = tl.where((column < columns)[None, :], weight, 0.0)
        sums = tl.dot(weight, x, sums, input_precision="ieee")
    bias = tl.load(bias_ptr + o, mask=is_o, other=0.0)
    sums += bias.to(tl.float32)[:, None]
    to = y_ptr + b[None, :] * outputs + o[:, None]
    tl.store(to, sums.to(y_ptr.dtype.element_ty), mask=is_b[None, :] & is_o[:, None])


def _bits(x: Tensor) -> Tensor:
    """Return a matrix with adjacent columns as integers of the size of its elements."""
    adjacent = x if x.stride(1) == 1 else x.contiguous()
    return adjacent.view(SIGNED[x.element_size()])


def prune(w: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = w.shape
    metadata = torch.empty(pattern.metadata_shape(rows, columns), dtype=torch.int32, device=w.device)
    values = torch.empty((rows, columns // NONZEROS), dtype=w.dtype, device=w.device)
    blocks, row_blocks, _ = metadata.shape
    if metadata.numel():
        bits = _bits(w)
        prune_rows[(blocks * row_blocks,)](
            bits,
            values.view(bits.dtype),
            metadata,
            rows,
            columns,
            bits.stride(0) if rows > 1 else columns,
            row_blocks,
            INFINITY=pattern.INFINITY[w.dtype],
            MASK=torch.iinfo(bits.dtype).max,
            num_warps=2,
        )
    return values, metadata


def expand(values: Tensor, metadata: Tensor) -> Tensor:
    rows, columns = values.shape[0], values.shape[1] * GROUP // NONZEROS
    w = torch.empty((rows, columns), dtype=values.dtype, device=values.device)
    if w.numel():
        bits, metadata = _bits(values), metadata.contiguous()
        blocks, row_blocks, _ = metadata.shape
        expand_rows[(blocks * row_blocks,)](
            bits,
            metadata,
            w.view(bits.dtype),
            rows,
            columns,
            bits.stride(0) if rows > 1 else columns // NONZEROS,
            row_blocks,
            num_warps=2,
        )
    return w


def linear(x: Tensor, values: Tensor, metadata: Tensor, bias: Tensor) -> Tensor:
    outputs, columns = values.shape[0], x.shape[-1]
    y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if not columns:
        return y.copy_(bias)
    x2d = x.reshape(-1, columns)
    x2d, values = (t if t.stride(1) == 1 else t.contiguous() for t in (x2d, values))
    metadata = metadata.contiguous()
    batch, tile = x2d.shape[0], TILES[x.element_size()]
    linear_tiles[(triton.cdiv(batch, tile[0]), triton.cdiv(outputs, tile[1]))](
        x2d,
        values,
        metadata,
        bias.contiguous(),
        y,
        batch,
        outputs,
        columns,
        x2d.stride(0),
        values.stride(0),
        metadata.shape[1],
        BATCH=tile[0],
        OUTPUTS=tile[1],
        DEPTH=tile[2],
        num_warps=4,
    )
    return y


def _format_kernels(kernel: Any, names: tuple[str, ...], with_keys: bool) -> tuple[TritonAotKernel, ...]:
    kernels = []
    for dtype, name in ((torch.float32, "i32"), (torch.bfloat16, "i16"), (torch.float16, "i16")):
        signature: dict[str, Any] = {
            **{key: "*i32" if key == "metadata_ptr" else f"*{name}" for key in names},
            **dict.fromkeys(("rows", "columns", "stride", "row_blocks"), "i64"),
        }
        if with_keys:
            mask = torch.iinfo(SIGNED[dtype.itemsize]).max
            signature |= {"INFINITY": pattern.INFINITY[dtype], "MASK": mask}
        label = f"{kernel.fn.__name__}-{str(dtype).removeprefix('torch.')}"
        kernels.append(TritonAotKernel(label=label, kernel=kernel, signature=signature, num_warps=2))
    return tuple(kernels)


def _linear_kernels() -> tuple[TritonAotKernel, ...]:
    return tuple(
        TritonAotKernel(
            label=f"linear_tiles-{dtype}",
            kernel=linear_tiles,
            signature={
                **dict.fromkeys(("x_ptr", "values_ptr"), f"*{dtype}"),
                "metadata_ptr": "*i32",
                **dict.fromkeys(("bias_ptr", "y_ptr"), f"*{dtype}"),
                **dict.fromkeys(("batch", "outputs", "columns"), "i64"),
                **dict.fromkeys(("x_stride", "values_stride"), "i64:16"),
                "row_blocks": "i64",
                **dict(zip(("BATCH", "OUTPUTS", "DEPTH"), TILES[4 if dtype == "fp32" else 2], strict=True)),
            },
            num_warps=4,
        )
        for dtype in ("fp32", "bf16", "fp16")
    )


PRUNE_2_4 = Implementation(
    operator="prune_2_4",
    backend="triton",
    forward=prune,
    backward=lambda grad, metadata: (expand(grad, metadata),),
    aot_kernels=_format_kernels(prune_rows, ("w_ptr", "values_ptr", "metadata_ptr"), True),
    idea="a program makes a block of 32 words from 16 rows of 64 elements",
)
EXPAND_2_4 = Implementation(
    operator="expand_2_4",
    backend="triton",
    forward=expand,
    backward=expand_backward,
    delegates_to_torch=(BACKWARD,),
    aot_kernels=_format_kernels(expand_rows, ("values_ptr", "metadata_ptr", "w_ptr"), False),
    idea="a program writes 16 rows of 64 elements from 32 words",
)
SPARSE_LINEAR = Implementation(
    operator="sparse_linear",
    backend="triton",
    forward=linear,
    backward=partial(linear_backward, expand=expand),
    delegates_to_torch=(BACKWARD,),
    aot_kernels=_linear_kernels(),
    idea="tiles of the weight are expanded in registers, then a dense product",
)
