"""Activations in Triton: one program for each block of elements, float32 arithmetic, one read and one write.

GELU's tanh is computed as a sigmoid, y = x / (1 + exp(-2u)). The textbook form (e^2u - 1) / (e^2u + 1) is
inf/inf above x = 10.07; this form gives x/inf = 0 at worst. bias_gelu takes tiles of a few rows, so that a
bias is loaded once for all of them. Its backward is the linear operators' pass over columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any

import torch

from weft.backends.triton_jit import TritonAotKernel, launch_and_prepare, tl, triton
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.ops._common.column_sums import aot_column_kernels, column_sums
from weft.ops._common.elementwise_triton import SHIPPED, Config, elementwise_aot_kernels, gelu
from weft.ops._common.layout import contiguous_like, dense, match_strides, view_2d
from weft.ops._common.prepared import LaunchCache

GELU_CANDIDATES = tuple(Config(b, w) for b in (1024, 2048, 4096, 8192) for w in (4, 8))
# By item size: 16 to 32 bytes a thread in many small programs (tools/sweep.py times the candidates).
GELU_CONFIGS = {2: Config(block=2048, warps=4), 4: Config(block=1024, warps=8)}


@triton.jit
def exp_minus_2u(x):
    """Return exp(-2u) for float32 x; GELU is x sigmoid(2u) = x / (1 + exp(-2u))."""
    u = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)
    return tl.exp(-2.0 * u)


@triton.jit
def gelu_forward(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    # x, y: (n,) storage order. Bytes moved: n read + n written, times the item size.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    tl.store(y_ptr + at, (x / (1.0 + exp_minus_2u(x))).to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def gelu_backward(grad_ptr, x_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    # grad, x, dx: (n,). dy/dx = s + x s (1 - s) 2u', with s = sigmoid(2u). Bytes: 2n read + n written.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=at < n).to(tl.float32)
    e = exp_minus_2u(x)
    s = 1.0 / (1.0 + e)
    # 1 - s loses its digits where s is near 1; e s is exact there.
    one_minus_s = tl.where(s < 0.5, 1.0 - s, e * s)
    # x^2 stays finite: where the slope is 0 or 1, inf would give 0 * inf = NaN.
    du_dx = 0.7978845608028654 * (1.0 + 3 * 0.044715 * tl.minimum(x * x, 1e30))
    dx = grad * (s + x * s * one_minus_s * 2.0 * du_dx)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=at < n)


def forward_gelu_with(config: Config, x: torch.Tensor) -> torch.Tensor:
    """Compute the forward with one launch configuration."""
    x = dense(x)
    y = torch.empty_like(x)
    if n := x.numel():
        grid = (triton.cdiv(n, config.block),)
        gelu_forward[grid](x, y, n, BLOCK=config.block, num_warps=config.warps)
    return y


def forward_gelu(x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    y = torch.empty_like(x)
    _launch_gelu(gelu_forward, x, y)
    return y


def backward_gelu(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    x = dense(x)
    dx = torch.empty_like(x)
    _launch_gelu(gelu_backward, match_strides(grad, x), x, dx)
    return (dx,)


GELU_LAUNCHES = LaunchCache()


def _launch_gelu(kernel: Any, *tensors: torch.Tensor) -> None:
    first = tensors[0]
    n = first.numel()
    if not n:
        return
    addresses = [t.data_ptr() for t in tensors]
    aligned = not reduce(or_, addresses) & 15
    key = (len(tensors), n, first.dtype, first.get_device())
    launch = GELU_LAUNCHES.get(key) if aligned else None
    if launch is not None:
        launch(*addresses)
        return
    config = GELU_CONFIGS[first.element_size()]
    grid = (triton.cdiv(n, config.block),)
    options = {"BLOCK": config.block, "num_warps": config.warps}
    launch = launch_and_prepare(kernel, grid, *tensors, n, **options)
    if aligned:
        GELU_LAUNCHES.store(key, launch)


@triton.jit
def relu_forward(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    # x, y: (n,) storage order. Bytes moved: n read + n written. NaN <= 0 is false: NaN passes.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    # tl.maximum drops a NaN unless told otherwise; the comparison keeps it.
    y = tl.where(x <= 0.0, 0.0, x)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def relu_backward(grad_ptr, y_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    # grad, y, dx: (n,). Bytes moved: 2n read + n written.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + at, mask=at < n).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=at < n).to(tl.float32)
    dx = tl.where(y <= 0.0, 0.0, grad)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=at < n)


def forward_relu(x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    y = torch.empty_like(x)
    if n := x.numel():
        config = SHIPPED[x.element_size()]
        grid = (triton.cdiv(n, config.block),)
        relu_forward[grid](x, y, n, BLOCK=config.block, num_warps=config.warps)
    return y


def backward_relu(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    y = dense(y)
    dx = torch.empty_like(y)
    if n := y.numel():
        config = SHIPPED[y.element_size()]
        grid = (triton.cdiv(n, config.block),)
        grad = match_strides(grad, y)
        relu_backward[grid](grad, y, dx, n, BLOCK=config.block, num_warps=config.warps)
    return (dx,)


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Tile of ``rows`` by ``block`` columns, computed by ``warps`` warps."""

    block: int
    rows: int
    warps: int = 4


@triton.jit
def bias_gelu_forward(
    x_ptr, bias_ptr, y_ptr, rows, columns, blocks, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # x: (rows, columns), rows x_stride apart; bias: (columns,); y: contiguous. `blocks` tiles cover the
    # columns. Bytes moved: n read + n written.
    pid = tl.program_id(0)
    # Neighbouring programs have neighbouring column tiles of the same rows.
    column = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    row = (pid // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (column < columns)[None, :]
    x = tl.load(x_ptr + row * x_stride + column[None, :], mask=inside).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < columns).to(tl.float32)
    y, _ = gelu(x + bias[None, :])
    tl.store(y_ptr + row * columns + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@cache
def bias_gelu_config(columns: int, itemsize: int) -> TileConfig:
    """Return the forward's tile: 16 bytes a thread, and at least two rows for each load of a bias."""
    block = min(max(triton.next_power_of_2(columns), 16), 512 if itemsize == 2 else 256)
    return TileConfig(block=block, rows=max(1, 2048 // itemsize // block))


def forward_bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = contiguous_like(x)
    if not y.numel():
        return y
    x2d = view_2d(x)
    rows, columns = x2d.shape
    config = bias_gelu_config(columns, x.element_size())
    blocks = triton.cdiv(columns, config.block)
    bias_gelu_forward[(blocks * triton.cdiv(rows, config.rows),)](
        x2d,
        bias.contiguous(),
        y,
        rows,
        columns,
        blocks,
        x2d.stride(0),
        ROWS=config.rows,
        BLOCK=config.block,
        num_warps=config.warps,
    )
    return y


def backward_bias_gelu(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx = grad gelu'(x + bias) and its sums over rows, in a fixed order of chunks of rows."""
    if not x.numel():
        return contiguous_like(x), torch.zeros_like(bias)
    dbias, dx = column_sums(view_2d(grad), view_2d(x), bias=bias)
    assert dx is not None, "column_sums returns dx whenever it gets x"
    return dx.view(x.shape), dbias


def _bias_gelu_aot_kernels() -> tuple[TritonAotKernel, ...]:
    kernels = []
    for dtype, itemsize in (("fp32", 4), ("bf16", 2)):
        pointer, config = f"*{dtype}", bias_gelu_config(3072, itemsize)
        sizes = {"rows": "i32:16", "columns": "i32:16", "blocks": "i32", "x_stride": "i32:16"}
        signature = {"x_ptr": pointer, "bias_ptr": pointer, "y_ptr": pointer, **sizes}
        kernels.append(
            TritonAotKernel(
                label=f"bias_gelu_forward-{dtype}",
                kernel=bias_gelu_forward,
                signature={**signature, "ROWS": config.rows, "BLOCK": config.block},
                num_warps=config.warps,
            )
        )
    return (*kernels, *aot_column_kernels("slope", bias=True))


# Elementwise: an element has the same bits wherever it is, so that each implementation is batch invariant.
GELU = with_invariant(
    Implementation(
        operator="gelu",
        backend="triton",
        forward=forward_gelu,
        backward=backward_gelu,
        aot_kernels=elementwise_aot_kernels(
            {gelu_forward: ("x_ptr", "y_ptr"), gelu_backward: ("grad_ptr", "x_ptr", "dx_ptr")},
            dtypes=("fp32", "fp16", "bf16"),
            configs=GELU_CONFIGS,
        ),
        idea="one fused pass",
    )
)
RELU = with_invariant(
    Implementation(
        operator="relu",
        backend="triton",
        forward=forward_relu,
        backward=backward_relu,
        aot_kernels=elementwise_aot_kernels(
            {relu_forward: ("x_ptr", "y_ptr"), relu_backward: ("grad_ptr", "y_ptr", "dx_ptr")}
        ),
        idea="one fused pass",
    )
)
BIAS_GELU = with_invariant(
    Implementation(
        operator="bias_gelu",
        backend="triton",
        forward=forward_bias_gelu,
        backward=backward_bias_gelu,
        aot_kernels=_bias_gelu_aot_kernels(),
        idea="one fused pass; the bias's gradient in chunks of rows",
    )
)
