"""Philox 4x32-10 and dropout in Triton: the words of philox.py, bit for bit."""

from __future__ import annotations

import torch

from weft.backends.triton_jit import tl, triton
from weft.ops._shared.elementwise import contiguous_like
from weft.ops._shared.elementwise_triton import Config
from weft.ops._shared.philox import halves, limit, scale, threshold


@triton.jit
def philox(low, high, counter):
    """The four uint32 words of the blocks at ``counter`` (int64) under the key (low, high).

    Products are taken in 64 bits: one wide multiply gives both halves.
    """
    low = low.to(tl.uint32, bitcast=True)
    high = high.to(tl.uint32, bitcast=True)
    a = (counter & 0xFFFFFFFF).to(tl.uint32)
    b = (counter >> 32).to(tl.uint32)
    c = tl.zeros_like(a)
    d = tl.zeros_like(a)
    for _ in tl.static_range(10):
        first = a.to(tl.uint64) * 0xD2511F53
        second = c.to(tl.uint64) * 0xCD9E8D57
        a = (second >> 32).to(tl.uint32) ^ b ^ low
        b = second.to(tl.uint32)
        c = (first >> 32).to(tl.uint32) ^ d ^ high
        d = first.to(tl.uint32)
        low = tl.add(low, 0x9E3779B9, sanitize_overflow=False)
        high = tl.add(high, 0xBB67AE85, sanitize_overflow=False)
    return a, b, c, d


@triton.jit
def kept_of_four(low, high, limit, counter, SHAPE: tl.constexpr):
    """Which elements of a tile of SHAPE are kept: blocks of words are made once, for four
    neighbours each. ``counter`` (int64) has a quarter of the tile's columns."""
    a, b, c, d = philox(low, high, counter)
    least = limit.to(tl.uint32, bitcast=True)
    # Bytes, since a layout may have to change. (a, c) with (b, d): the last two axes then read a,
    # b, c, d.
    even = tl.join((a >= least).to(tl.int8), (c >= least).to(tl.int8))
    odd = tl.join((b >= least).to(tl.int8), (d >= least).to(tl.int8))
    return tl.reshape(tl.join(even, odd), SHAPE) != 0


@triton.jit
def kept_of_each(low, high, limit, at):
    """Which elements anywhere are kept: a block of words for each, of which one counts."""
    a, b, c, d = philox(low, high, at // 4)
    k = at % 4
    word = tl.where(k < 2, tl.where(k == 0, a, b), tl.where(k == 2, c, d))
    return word >= limit.to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["low", "high", "limit"])
def dropout_apply(x_ptr, y_ptr, n, low, high, limit, scale, BLOCK: tl.constexpr):
    # x, y: (n,) row-major; (low, high) the seed; `limit` the threshold, an int32's bits. Bytes
    # moved: n read + n written. The backward is the same, from gradient to gradient.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    counter = first // 4 + tl.arange(0, BLOCK // 4)
    y = tl.where(kept_of_four(low, high, limit, counter, (BLOCK,)), x * scale, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


def dropout(config: Config, x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Dropout of ``x`` by one launch configuration."""
    y = contiguous_like(x)
    if threshold(p) >> 32:
        return y.zero_()
    if n := x.numel():
        grid = (triton.cdiv(n, config.block),)
        arguments = (x.contiguous(), y, n, *halves(seed), limit(p), scale(p))
        dropout_apply[grid](*arguments, BLOCK=config.block, num_warps=config.warps)
    return y
