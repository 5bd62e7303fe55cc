"""GELU in Triton: one program a block of elements, float32 arithmetic, one read and one write.

tanh is taken as a sigmoid, y = x / (1 + exp(-2u)): the textbook (e^2u - 1)/(e^2u + 1) is inf/inf
above x = 10.07, while this form only meets x/inf = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weft.backends.triton_jit import TritonSpecimen, tl, triton
from weft.core import Implementation
from weft.ops._shared.layout import aligned_with, dense


@dataclass(frozen=True)
class Config:
    """``block`` elements a program, computed by ``warps`` warps."""

    block: int
    warps: int


CANDIDATES = tuple(Config(b, w) for b in (1024, 2048, 4096, 8192) for w in (4, 8))
# By item size: 16 to 32 bytes a thread, many small programs (see CANDIDATES and tools/sweep.py).
SHIPPED = {2: Config(block=2048, warps=4), 4: Config(block=1024, warps=8)}


@triton.jit
def exp_minus_2u(x):
    """exp(-2u) for float32 x; the share of x that passes, sigmoid(2u), is 1 / (1 + exp(-2u))."""
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
    # grad, x, dx: (n,). dy/dx = s + x s (1 - s) 2u', with s = sigmoid(2u).
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=at < n).to(tl.float32)
    e = exp_minus_2u(x)
    s = 1.0 / (1.0 + e)
    # 1 - s loses its digits where s nears 1; there e s has them all.
    rest = tl.where(s < 0.5, 1.0 - s, e * s)
    # x^2 is held finite so that 0 * inf makes no NaN of a gradient that is plainly 0 or 1.
    slope = 0.7978845608028654 * (1.0 + 3 * 0.044715 * tl.minimum(x * x, 1e30))
    dx = grad * (s + x * s * rest * 2.0 * slope)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=at < n)


def forward_with(config: Config, x: torch.Tensor) -> torch.Tensor:
    """The forward by one launch configuration."""
    x = dense(x)
    y = torch.empty_like(x)
    if n := x.numel():
        grid = (triton.cdiv(n, config.block),)
        gelu_forward[grid](x, y, n, BLOCK=config.block, num_warps=config.warps)
    return y


def forward(x: torch.Tensor) -> torch.Tensor:
    return forward_with(SHIPPED[x.element_size()], x)


def backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    x = dense(x)
    dx = torch.empty_like(x)
    if n := x.numel():
        config = SHIPPED[x.element_size()]
        grid = (triton.cdiv(n, config.block),)
        gradient = aligned_with(grad, x)
        gelu_backward[grid](gradient, x, dx, n, BLOCK=config.block, num_warps=config.warps)
    return (dx,)


def _specimen(kernel: Any, pointers: tuple[str, ...], dtype: str, config: Config) -> TritonSpecimen:
    typed = dict.fromkeys(pointers, f"*{dtype}")
    return TritonSpecimen(
        label=f"{kernel.__name__}-{dtype}",
        kernel=kernel,
        signature={**typed, "n": "i32:16", "BLOCK": config.block},
        num_warps=config.warps,
    )


SPECIMENS = tuple(
    _specimen(kernel, pointers, dtype, SHIPPED[size])
    for kernel, pointers in (
        (gelu_forward, ("x_ptr", "y_ptr")),
        (gelu_backward, ("grad_ptr", "x_ptr", "dx_ptr")),
    )
    for dtype, size in (("fp32", 4), ("fp16", 2), ("bf16", 2))
)

IMPLEMENTATION = Implementation(
    operator="gelu",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=SPECIMENS,
    idea="one fused pass",
)
