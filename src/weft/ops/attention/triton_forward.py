"""Attention's forward in Triton: softmax(q k^T scale) v by tiles; no score is written to memory.

One program computes BM queries of one head and reads its keys BN at a time, with the running maximum and sum
of online softmax (arXiv:1805.02867); the weighted values are rescaled as the maximum rises (FlashAttention-2,
arXiv:2307.08691). Exponentials are powers of 2. Two loops over the keys: the first
without a mask over the keys that every query of the tile sees, the second with a mask over the diagonal and
the ragged end. Keys that no query sees are not read.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from weft.backends.triton_jit import tl, triton
from weft.ops.attention.triton_tiles import LN2, dropout_mask, load_tile, store_tile, visible_keys


@triton.jit(do_not_specialize=["low", "high", "threshold"])
def attention_forward(
    q_source, k_source, v_source, lengths, out_ptr, lse_ptr,
    heads, group, tq, tk,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    scale, low, high, threshold, rescale,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, DROPOUT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    # q, out: (B, H, Tq, D); k, v: (B, H / group, Tk, D), by strides, with adjacent columns; lse: (B, H, Tq)
    # float32; lengths: (B,) int32, read where PADDED. `scale` includes log2(e). Bytes: q read and out
    # written once; k and v read once by each tile of queries, mostly from the L2.
    head, batch = tl.program_id(1), tl.program_id(2)
    block = tl.program_id(0)
    if CAUSAL:  # blocks with most keys start first, so that the last blocks of the grid are short
        block = tl.num_programs(0) - 1 - block
    start = block * BM
    rows = start + tl.arange(0, BM)
    keys = visible_keys(lengths, batch, tk, PADDED)
    line = batch * heads + head
    q = load_tile(q_source, batch, head, start, tq, q_batch, q_head, q_row, BM, D, DP, TMA)
    acc = tl.zeros((BM, DP), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    last = keys
    unmasked_end = keys // BN * BN
    if CAUSAL:
        last = tl.minimum(keys, start + BM)
        unmasked_end = tl.minimum(unmasked_end, (start + 1) // BN * BN)
    # Grouped-query attention: `group` adjacent query heads read one head of keys.
    kv_head = head // group
    # The two loops are one body that is compiled twice: with `masked` 0 all mask code is removed.
    for masked in tl.static_range(2):
        for key_start in tl.range(unmasked_end if masked else 0, last if masked else unmasked_end, BN):
            key_start = tl.multiple_of(key_start, BN)
            k = load_tile(k_source, batch, kv_head, key_start, tk, k_batch, k_head, k_row, BN, D, DP, TMA)
            s = tl.dot(q, k.T, input_precision="ieee")
            column = key_start + tl.arange(0, BN)
            if masked == 1:
                seen = (column < keys)[None, :]
                if CAUSAL:
                    seen = seen & (column[None, :] <= rows[:, None])
                s = tl.where(seen, s, float("-inf"))
            # Every query sees the first key, so that no maximum is -inf after the first tile.
            higher = tl.maximum(top, tl.max(s, 1) * scale)
            p = tl.exp2(s * scale - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(p, 1)
            if DROPOUT:
                keep_mask = dropout_mask(low, high, threshold, line, rows[:, None], column[None, :], tq, tk)
                p = tl.where(keep_mask, p, 0.0)
            v = load_tile(v_source, batch, kv_head, key_start, tk, v_batch, v_head, v_row, BN, D, DP, TMA)
            if masked == 1 and PADDED:  # values past a length may be NaN, and 0 times NaN is NaN
                v = tl.where((column < keys)[:, None], v, 0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            top = higher
    # A query that sees no key: an output of 0, and a log-sum-exp of -inf.
    total = tl.where(total == 0.0, 1.0, total)
    out = acc * (rescale / total)[:, None]
    store_tile(out_ptr, out, batch, head, start, tq, out_batch, out_head, out_row, BM, D, DP)
    lse = (top + tl.log2(total)) * LN2
    tl.store(lse_ptr + tl.cast(line, tl.int64) * tq + rows, lse, mask=rows < tq)
