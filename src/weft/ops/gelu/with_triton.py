"""GELU in Triton: one program a block of elements, float32 arithmetic, one read and one write.

tanh is taken as a sigmoid, y = x / (1 + exp(-2u)): the textbook (e^2u - 1)/(e^2u + 1) is inf/inf
above x = 10.07, while this form only meets x/inf = 0.
"""

from __future__ import annotations

import torch

from weft.backends.triton_jit import TritonSpecimen, tl, triton
from weft.core import Implementation
from weft.ops._shared.layout import aligned_with, dense

BLOCK = 4096  # elements a program
WARPS = 8


@triton.jit
def sigmoid_2u(x):
    """sigmoid(2u) for float32 x: the share of x that passes."""
    u = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)
    return 1.0 / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def gelu_forward(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    # x, y: (n,) storage order. Bytes moved: n read + n written, times the item size.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    tl.store(y_ptr + at, (x * sigmoid_2u(x)).to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def gelu_backward(grad_ptr, x_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    # grad, x, dx: (n,). dy/dx = s + x s (1 - s) 2u', with s = sigmoid(2u).
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=at < n).to(tl.float32)
    s = sigmoid_2u(x)
    # x^2 is held finite so that 0 * inf makes no NaN of a gradient that is plainly 0 or 1.
    slope = 0.7978845608028654 * (1.0 + 3 * 0.044715 * tl.minimum(x * x, 1e30))
    dx = grad * (s + x * s * (1.0 - s) * 2.0 * slope)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=at < n)


def forward(x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    y = torch.empty_like(x)
    if n := x.numel():
        gelu_forward[(triton.cdiv(n, BLOCK),)](x, y, n, BLOCK=BLOCK, num_warps=WARPS)
    return y


def backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    x = dense(x)
    dx = torch.empty_like(x)
    if n := x.numel():
        gelu_backward[(triton.cdiv(n, BLOCK),)](
            aligned_with(grad, x), x, dx, n, BLOCK=BLOCK, num_warps=WARPS
        )
    return (dx,)


def _specimens() -> tuple[TritonSpecimen, ...]:
    both = ((gelu_forward, ("x_ptr", "y_ptr")), (gelu_backward, ("grad_ptr", "x_ptr", "dx_ptr")))
    return tuple(
        TritonSpecimen(
            label=f"{kernel.__name__}-{dtype}",
            kernel=kernel,
            signature={**dict.fromkeys(pointers, f"*{dtype}"), "n": "i32:16", "BLOCK": BLOCK},
            num_warps=WARPS,
        )
        for kernel, pointers in both
        for dtype in ("fp32", "fp16", "bf16")
    )


IMPLEMENTATION = Implementation(
    operator="gelu",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=_specimens(),
    idea="one fused pass",
)
