"""Attention's forward in Triton: softmax(q k^T scale) v by tiles, no score ever written.

One program takes BM queries of one head and walks its keys BN at a time, with the running maximum
and sum of online softmax (arXiv:1805.02867) and the weighted values rescaled as the maximum rises
(FlashAttention-2, arXiv:2307.08691). Exponentials are powers of 2: log2(e) is in the scale. Keys
that every query of the tile sees go through a loop without a mask; the diagonal and the ragged end
through one with it; keys that none sees are not read.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from weft.backends.triton_jit import tl, triton
from weft.ops.attention.tiles import LN2, is_kept, keys_of, store_tile, tile


@triton.jit
def attend(
    acc,
    total,
    top,
    q,
    k_source,
    v_source,
    batch,
    head,
    line,
    rows,
    first,
    last,
    keys,
    tq,
    tk,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    scale,
    low,
    high,
    threshold,
    BN: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    DROPOUT: tl.constexpr,
    TMA: tl.constexpr,
):
    """Walk the keys from ``first`` to ``last``; ``scale`` has log2(e) in it."""
    for start in tl.range(first, last, BN):
        start = tl.multiple_of(start, BN)
        k = tile(k_source, batch, head, start, tk, k_batch, k_head, k_row, BN, D, DP, TMA)
        s = tl.dot(q, k.T, input_precision="ieee")
        column = start + tl.arange(0, BN)
        if MASKED:
            seen = (column < keys)[None, :]
            if CAUSAL:
                seen = seen & (column[None, :] <= rows[:, None])
            s = tl.where(seen, s, float("-inf"))
        # The first key of all is seen by every query, so that after one tile no maximum is -inf.
        higher = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT:
            kept = is_kept(low, high, threshold, line, rows[:, None], column[None, :], tq, tk)
            p = tl.where(kept, p, 0.0)
        v = tile(v_source, batch, head, start, tk, v_batch, v_head, v_row, BN, D, DP, TMA)
        if MASKED and PADDED:  # what stands past a length may be anything: 0 times NaN is NaN
            v = tl.where((column < keys)[:, None], v, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    return acc, total, top


@triton.jit(do_not_specialize=["low", "high", "threshold"])
def attention_forward(
    q_source,
    k_source,
    v_source,
    lengths,
    out_ptr,
    lse_ptr,
    heads,
    group,
    tq,
    tk,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    out_batch,
    out_head,
    out_row,
    scale,
    low,
    high,
    threshold,
    rescale,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    DROPOUT: tl.constexpr,
    TMA: tl.constexpr,
):
    # q, out: (B, H, Tq, D); k, v: (B, H / group, Tk, D), by strides, columns side by side; lse:
    # (B, H, Tq) float32; lengths: (B,) int32, read where PADDED. Bytes: q read and out written
    # once; k and v once a tile of queries, mostly from L2.
    head, batch = tl.program_id(1), tl.program_id(2)
    block = tl.program_id(0)
    if CAUSAL:  # the longest first: what is left for the end is short
        block = tl.num_programs(0) - 1 - block
    start = block * BM
    rows = start + tl.arange(0, BM)
    keys = keys_of(lengths, batch, tk, PADDED)
    line = batch * heads + head
    q = tile(q_source, batch, head, start, tq, q_batch, q_head, q_row, BM, D, DP, TMA)
    acc = tl.zeros((BM, DP), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    last = keys
    clear = keys // BN * BN
    if CAUSAL:
        last = tl.minimum(keys, start + BM)
        clear = tl.minimum(clear, (start + 1) // BN * BN)
    for masked in tl.static_range(2):
        acc, total, top = attend(
            acc,
            total,
            top,
            q,
            k_source,
            v_source,
            batch,
            head // group,
            line,
            rows,
            clear if masked else 0,
            last if masked else clear,
            keys,
            tq,
            tk,
            k_batch,
            k_head,
            k_row,
            v_batch,
            v_head,
            v_row,
            scale,
            low,
            high,
            threshold,
            BN,
            D,
            DP,
            masked == 1,
            CAUSAL,
            PADDED,
            DROPOUT,
            TMA,
        )
    # No key at all: an answer of 0, and a log-sum-exp of -inf.
    total = tl.where(total == 0.0, 1.0, total)
    out = acc * (rescale / total)[:, None]
    store_tile(out_ptr, out, batch, head, start, tq, out_batch, out_head, out_row, BM, D, DP)
    lse = (top + tl.log2(total)) * LN2
    tl.store(lse_ptr + tl.cast(line, tl.int64) * tq + rows, lse, mask=rows < tq)
