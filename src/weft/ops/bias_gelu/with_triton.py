"""Bias and GELU in Triton: tiles of a few rows, so that a bias is loaded once for them.

The backward is the linear operators' pass over columns: GELU's slope, and the bias's gradient by
sums of chunks of rows, which a second kernel adds up, in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from weft.backends.triton_jit import TritonSpecimen, tl, triton
from weft.core import Implementation
from weft.ops._shared.elementwise import contiguous_like
from weft.ops._shared.elementwise_triton import gelu
from weft.ops._shared.linear_columns import column_sums
from weft.ops._shared.linear_columns import specimens as column_specimens
from weft.ops._shared.rows import as_rows


@dataclass(frozen=True, kw_only=True)
class Config:
    """A tile of ``rows`` by ``block`` columns."""

    block: int
    rows: int
    warps: int = 4


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


@cache
def configure(columns: int, size: int) -> Config:
    """The forward's tile: 16 bytes a thread and two rows or more a bias."""
    block = min(max(triton.next_power_of_2(columns), 16), 512 if size == 2 else 256)
    return Config(block=block, rows=max(1, 2048 // size // block))


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
    dbias, dx = column_sums(as_rows(grad), as_rows(x), bias=bias)
    assert dx is not None, "a pass with slopes writes them"
    return dx.view(x.shape), dbias


def _specimens() -> tuple[TritonSpecimen, ...]:
    found = []
    for kind, size in (("fp32", 4), ("bf16", 2)):
        t, one = f"*{kind}", configure(3072, size)
        sizes = {"rows": "i32:16", "columns": "i32:16", "blocks": "i32", "x_stride": "i32:16"}
        signature = {"x_ptr": t, "bias_ptr": t, "y_ptr": t, **sizes}
        found.append(
            TritonSpecimen(
                label=f"bias_gelu_forward-{kind}",
                kernel=bias_gelu_forward,
                signature={**signature, "ROWS": one.rows, "BLOCK": one.block},
                num_warps=one.warps,
            )
        )
    return (*found, *column_specimens("slope", bias=True))


IMPLEMENTATION = Implementation(
    operator="bias_gelu",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=_specimens(),
    idea="one fused pass; the bias's gradient in chunks of rows",
)
