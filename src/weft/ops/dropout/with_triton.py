"""Dropout in Triton: one pass; a block of random words is made once, for four elements."""

from __future__ import annotations

import torch

from weft.backends.triton_jit import tl, triton
from weft.core import Implementation
from weft.ops._shared.elementwise import contiguous_like
from weft.ops._shared.elementwise_triton import SHIPPED, Config, specimens
from weft.ops._shared.philox import halves, limit, scale, threshold
from weft.ops._shared.philox_triton import words_of_four


@triton.jit(do_not_specialize=["low", "high", "limit"])
def dropout_apply(x_ptr, y_ptr, n, low, high, limit, scale, BLOCK: tl.constexpr):
    # x, y: (n,) row-major; (low, high) the seed; `limit` the threshold, an int32's bits. Bytes
    # moved: n read + n written. The backward is the same, from gradient to gradient.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    words = words_of_four(low, high, first, BLOCK)
    y = tl.where(words >= limit.to(tl.uint32, bitcast=True), x * scale, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


def forward_with(config: Config, x: torch.Tensor, *, p: float, seed: int) -> torch.Tensor:
    """The forward by one launch configuration."""
    y = contiguous_like(x)
    if threshold(p) >> 32:
        return y.zero_()
    if n := x.numel():
        grid = (triton.cdiv(n, config.block),)
        arguments = (x.contiguous(), y, n, *halves(seed), limit(p), scale(p))
        dropout_apply[grid](*arguments, BLOCK=config.block, num_warps=config.warps)
    return y


def forward(x: torch.Tensor, *, p: float, seed: int) -> torch.Tensor:
    return forward_with(SHIPPED[x.element_size()], x, p=p, seed=seed)


def backward(grad: torch.Tensor, *, p: float, seed: int) -> tuple[torch.Tensor]:
    return (forward(grad, p=p, seed=seed),)


SCALARS = {"low": "i32", "high": "i32", "limit": "i32", "scale": "fp32"}
IMPLEMENTATION = Implementation(
    operator="dropout",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=specimens({dropout_apply: ("x_ptr", "y_ptr")}, SCALARS),
    idea="one fused pass, words made in registers",
)
