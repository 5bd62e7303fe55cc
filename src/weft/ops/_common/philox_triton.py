"""Philox 4x32-10 in Triton: the words of philox.py, bit for bit."""

from __future__ import annotations

from weft.backends.triton_jit import tl, triton


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
