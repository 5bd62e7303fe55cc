"""Bias and GELU in Triton: tiles of a few rows, so that a bias is loaded once for them.

The bias's gradient is a sum over all rows: each program sums its strip of rows in registers and
writes one partial sum a column, and a second kernel adds those up, in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from weft.backends.triton_jit import TritonSpecimen, tl, triton
from weft.core import Implementation
from weft.ops._shared.elementwise import contiguous_like
from weft.ops._shared.elementwise_triton import gelu
from weft.ops._shared.rows import as_rows


@dataclass(frozen=True, kw_only=True)
class Config:
    """A tile of ``rows`` by ``block`` columns; the backward's program walks ``each`` rows."""

    block: int
    rows: int
    warps: int = 4
    each: int = 0


@triton.jit
def bias_gelu_forward(
    x_ptr, bias_ptr, y_ptr, rows, columns, blocks, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # x: (rows, columns), rows x_stride apart; bias: (columns,); y: contiguous. `blocks` tiles side
    # by side. Bytes moved: n read + n written.
    pid = tl.program_id(0)
    column = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    row = (pid // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (column < columns)[None, :]
    x = tl.load(x_ptr + row * x_stride + column[None, :], mask=inside).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < columns).to(tl.float32)
    y, _ = gelu(x + bias[None, :])
    tl.store(y_ptr + row * columns + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def bias_gelu_backward(
    grad_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, rows, columns, grad_stride, x_stride, each,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # grad, x: (rows, columns), rows a stride apart; dx: contiguous; partial: (strips, columns)
    # float32. A program has one strip of `each` rows by BLOCK columns. Bytes moved: 2n read + n
    # written, and four bytes a column and strip.
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = column < columns
    start = tl.program_id(1).to(tl.int64) * each
    stop = tl.minimum(start + each, rows)
    bias = tl.load(bias_ptr + column, mask=within).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < stop) & within[None, :]
        x = tl.load(x_ptr + row * x_stride + column[None, :], mask=inside, other=0)
        grad = tl.load(grad_ptr + row * grad_stride + column[None, :], mask=inside, other=0)
        _, slope = gelu(x.to(tl.float32) + bias)
        dx = grad.to(tl.float32) * slope
        out = dx_ptr + row * columns + column[None, :]
        tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        total += tl.where(inside, dx, 0.0)
    partial = partial_ptr + tl.program_id(1).to(tl.int64) * columns + column
    tl.store(partial, tl.sum(total, 0), mask=within)


@triton.jit
def bias_gelu_sum(partial_ptr, dbias_ptr, strips, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # partial: (strips, columns) float32; dbias: (columns,). A program adds up BLOCK columns.
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, strips, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < strips) & (column < columns)[None, :]
        at = row.to(tl.int64) * columns + column[None, :]
        total += tl.load(partial_ptr + at, mask=inside, other=0.0)
    dbias = tl.sum(total, 0).to(dbias_ptr.dtype.element_ty)
    tl.store(dbias_ptr + column, dbias, mask=column < columns)


@cache
def configure(columns: int, size: int) -> Config:
    """The forward's tile: 16 bytes a thread and two rows or more a bias."""
    block = min(max(triton.next_power_of_2(columns), 16), 512 if size == 2 else 256)
    return Config(block=block, rows=max(1, 2048 // size // block))


@cache
def configure_backward(rows: int, columns: int, size: int, multiprocessors: int) -> Config:
    """The backward's: a warp has 32 16-byte vectors of a row; 16 strips a multiprocessor."""
    block = min(max(triton.next_power_of_2(columns), 16), 512 // size)
    tile = max(4, 4096 // size // block)
    strips = max(1, 16 * multiprocessors // triton.cdiv(columns, block))
    each = triton.cdiv(triton.cdiv(rows, strips), tile) * tile
    return Config(block=block, rows=tile, each=max(each, min(4 * tile, rows)))


def candidates(rows: int, size: int) -> list[Config]:
    """The backward's configurations worth timing."""
    return [
        Config(block=b // size, rows=r, warps=w, each=each)
        for b, r, w in ((512, 4, 4), (512, 8, 4), (512, 8, 8), (2048, 2, 4), (2048, 4, 8))
        for each in (64, 128, 256, 512)
        if each <= rows
    ]


def forward(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = contiguous_like(x)
    if not y.numel():
        return y
    lines = as_rows(x)
    rows, columns = lines.shape
    config = configure(columns, x.element_size())
    blocks = triton.cdiv(columns, config.block)
    bias_gelu_forward[(blocks * triton.cdiv(rows, config.rows),)](
        lines,
        bias.contiguous(),
        y,
        rows,
        columns,
        blocks,
        lines.stride(0),
        ROWS=config.rows,
        BLOCK=config.block,
        num_warps=config.warps,
    )
    return y


def backward(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if not x.numel():
        return contiguous_like(x), torch.zeros_like(bias)
    columns = x.shape[-1]
    rows = x.numel() // columns
    return backward_with(
        configure_backward(rows, columns, x.element_size(), _multiprocessors(x.device)),
        grad,
        x,
        bias,
    )


def backward_with(
    config: Config, grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backward by one configuration; ``x`` has elements."""
    dx, dbias = contiguous_like(x), contiguous_like(bias)
    grads, lines = as_rows(grad), as_rows(x)
    rows, columns = lines.shape
    strips = triton.cdiv(rows, config.each)
    partial = torch.empty(strips, columns, dtype=torch.float32, device=x.device)
    bias_gelu_backward[(triton.cdiv(columns, config.block), strips)](
        grads,
        lines,
        bias.contiguous(),
        dx,
        partial,
        rows,
        columns,
        grads.stride(0),
        lines.stride(0),
        config.each,
        ROWS=config.rows,
        BLOCK=config.block,
        num_warps=config.warps,
    )
    grid = (triton.cdiv(columns, 32),)
    bias_gelu_sum[grid](partial, dbias, strips, columns, ROWS=64, BLOCK=32, num_warps=4)
    return dx, dbias


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":  # the interpreter: a few strips
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _specimens() -> tuple[TritonSpecimen, ...]:
    found = []
    for kind, size in (("fp32", 4), ("bf16", 2)):
        t, one, two = f"*{kind}", configure(3072, size), configure_backward(65536, 3072, size, 132)
        sizes = {"rows": "i32:16", "columns": "i32:16"}
        ahead = {"x_ptr": t, "bias_ptr": t, "y_ptr": t, **sizes, "blocks": "i32"}
        back = dict.fromkeys(("grad_ptr", "x_ptr", "bias_ptr", "dx_ptr"), t)
        strides = {"grad_stride": "i32:16", "x_stride": "i32:16", "each": "i32:16"}
        last = {"partial_ptr": "*fp32", "dbias_ptr": t, "strips": "i32", "columns": "i32:16"}
        for kernel, signature, c in (
            (bias_gelu_forward, {**ahead, "x_stride": "i32:16"}, one),
            (bias_gelu_backward, {**back, "partial_ptr": "*fp32", **sizes, **strides}, two),
            (bias_gelu_sum, last, Config(block=32, rows=64)),
        ):
            found.append(
                TritonSpecimen(
                    label=f"{kernel.__name__}-{kind}",
                    kernel=kernel,
                    signature={**signature, "ROWS": c.rows, "BLOCK": c.block},
                    num_warps=c.warps,
                )
            )
    return tuple(found)


IMPLEMENTATION = Implementation(
    operator="bias_gelu",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=_specimens(),
    idea="one fused pass; the bias's gradient in strips",
)
