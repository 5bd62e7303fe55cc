"""Dropout in Triton: the elements that philox_dropout.py keeps, a block of words for eight."""

from __future__ import annotations

import torch

from weft.backends.triton_jit import tl, triton
from weft.ops._shared.elementwise import contiguous_like
from weft.ops._shared.elementwise_triton import Config
from weft.ops._shared.philox import halves
from weft.ops._shared.philox_dropout import drops_all, limit, scale
from weft.ops._shared.philox_triton import philox


@triton.jit
def kept_of_eight(low, high, limit, counter, SHAPE: tl.constexpr):
    """Which elements of a tile of SHAPE are kept: blocks of words are made once, for eight
    neighbours each. ``counter`` (int64) has an eighth of the tile's columns; a thread that has one
    of them has its eight elements, which in 16 bits are an access of its own: nothing moves."""
    a, b, c, d = philox(low, high, counter)
    least = limit.to(tl.uint32, bitcast=True)
    # The last two axes: which pair of the words (a, b) and (c, d), and which of the pair.
    words = tl.join(tl.join(a, c), tl.join(b, d))
    # Bytes, since a layout may have to change.
    kept = tl.join((words << 16 >= least).to(tl.int8), (words >= least).to(tl.int8))
    return tl.reshape(kept, SHAPE) != 0


@triton.jit
def kept_of_each(low, high, limit, at):
    """Which elements anywhere are kept: a block of words for each, of which a half counts."""
    a, b, c, d = philox(low, high, at // 8)
    k = at % 8 // 2
    word = tl.where(k < 2, tl.where(k == 0, a, b), tl.where(k == 2, c, d))
    word = tl.where(at % 2 == 0, word << 16, word)
    return word >= limit.to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["low", "high", "limit"])
def dropout_apply(x_ptr, y_ptr, n, low, high, limit, scale, BLOCK: tl.constexpr):
    # x, y: (n,) row-major; (low, high) the seed; `limit` the threshold in the high half of an
    # int32. Bytes moved: n read + n written. The backward is the same, from gradient to gradient.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    counter = first // 8 + tl.arange(0, BLOCK // 8)
    y = tl.where(kept_of_eight(low, high, limit, counter, (BLOCK,)), x * scale, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


def dropout(config: Config, x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Dropout of ``x`` by one launch configuration."""
    y = contiguous_like(x)
    if drops_all(p):
        return y.zero_()
    if n := x.numel():
        grid = (triton.cdiv(n, config.block),)
        arguments = (x.contiguous(), y, n, *halves(seed), limit(p), scale(p))
        dropout_apply[grid](*arguments, BLOCK=config.block, num_warps=config.warps)
    return y
