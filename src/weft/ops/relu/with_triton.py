"""ReLU in Triton: one program a block of elements, one read and one write."""

from __future__ import annotations

import torch

from weft.backends.triton_jit import tl, triton
from weft.core import Implementation
from weft.ops._shared.elementwise_triton import SHIPPED, Config, specimens
from weft.ops._shared.layout import aligned_with, dense


@triton.jit
def relu_forward(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    # x, y: (n,) storage order. Bytes moved: n read + n written. NaN <= 0 is false: NaN passes.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
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


def forward_with(config: Config, x: torch.Tensor) -> torch.Tensor:
    """The forward by one launch configuration."""
    x = dense(x)
    y = torch.empty_like(x)
    if n := x.numel():
        grid = (triton.cdiv(n, config.block),)
        relu_forward[grid](x, y, n, BLOCK=config.block, num_warps=config.warps)
    return y


def forward(x: torch.Tensor) -> torch.Tensor:
    return forward_with(SHIPPED[x.element_size()], x)


def backward(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    y = dense(y)
    dx = torch.empty_like(y)
    if n := y.numel():
        config = SHIPPED[y.element_size()]
        grid = (triton.cdiv(n, config.block),)
        gradient = aligned_with(grad, y)
        relu_backward[grid](gradient, y, dx, n, BLOCK=config.block, num_warps=config.warps)
    return (dx,)


IMPLEMENTATION = Implementation(
    operator="relu",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=specimens(
        {relu_forward: ("x_ptr", "y_ptr"), relu_backward: ("grad_ptr", "y_ptr", "dx_ptr")}
    ),
    idea="one fused pass",
)
