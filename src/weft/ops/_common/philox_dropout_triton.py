"""Dropout in Triton: the mask of philox_dropout.py, one block of Philox words for eight elements."""

from __future__ import annotations

import torch

from weft.backends.triton_jit import tl, triton
from weft.ops._common.elementwise_triton import Config
from weft.ops._common.layout import contiguous_like
from weft.ops._common.philox import seed_words
from weft.ops._common.philox_dropout import drops_all, keep_scale, threshold_int32
from weft.ops._common.philox_triton import philox


@triton.jit
def keep_mask_by_eights(low, high, limit, counter, SHAPE: tl.constexpr):
    """Return the mask of a tile of SHAPE, with one block of words for eight adjacent elements.

    ``counter`` (int64) has an eighth of the tile's columns. The thread that computes a block also has its
    eight elements (one 16-byte vector of a 16-bit type), so that no data moves between threads.
    """
    a, b, c, d = philox(low, high, counter)
    threshold = limit.to(tl.uint32, bitcast=True)
    # The last two axes select the pair, (a, b) or (c, d), and the word in the pair.
    words = tl.join(tl.join(a, c), tl.join(b, d))
    # int8 instead of a mask, since the reshape may have to move data between threads.
    keep = tl.join((words << 16 >= threshold).to(tl.int8), (words >= threshold).to(tl.int8))
    return tl.reshape(keep, SHAPE) != 0


@triton.jit
def keep_mask_per_element(low, high, limit, at):
    """Return the mask of elements at any positions: one block of words for each."""
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
    # The mask is computed for the whole tile; elements past n are not stored.
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    counter = first // 8 + tl.arange(0, BLOCK // 8)
    y = tl.where(keep_mask_by_eights(low, high, limit, counter, (BLOCK,)), x * scale, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


def dropout(config: Config, x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Apply dropout to ``x`` with one launch configuration."""
    y = contiguous_like(x)
    if drops_all(p):
        return y.zero_()
    if n := x.numel():
        grid = (triton.cdiv(n, config.block),)
        arguments = (x.contiguous(), y, n, *seed_words(seed), threshold_int32(p), keep_scale(p))
        dropout_apply[grid](*arguments, BLOCK=config.block, num_warps=config.warps)
    return y
