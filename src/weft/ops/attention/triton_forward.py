"""Attention's forward in Triton: softmax(q k^T scale) v by tiles; no score is written to memory.

One program computes BM queries of one head and reads its keys BN at a time, with the running maximum and sum
of online softmax (arXiv:1805.02867); the weighted values are rescaled as the maximum rises (FlashAttention-2,
arXiv:2307.08691). Exponentials are powers of 2. Loops over the keys: one without a mask over the tiles that
every query sees, one with a mask over the diagonal and the ragged end, and with a window one before them over
its edge. Tiles that no query sees are not read.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from weft.backends.triton_jit import tl, triton
from weft.ops.attention.triton_tiles import (
    BY_FOURS,
    LN2,
    LOG2E,
    dropout_mask,
    key_bounds,
    load_tile,
    query_position,
    row_products,
    sees,
    store_tile,
    tanh,
    visible_keys,
    with_terms,
)


@triton.jit(do_not_specialize=["low", "high", "threshold", "window"])
def attention_forward(
    q_source, k_source, v_source, lengths, out_ptr, lse_ptr,
    heads, group, tq, tk,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    sinks_ptr, slopes_ptr, bias_ptr, slopes_batch, bias_batch, bias_head, bias_row, bias_column,
    scale, inner, window, low, high, threshold, rescale,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PADDED: tl.constexpr, DROPOUT: tl.constexpr, TMA: tl.constexpr,
    SINKS: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    # q, out: (B, H, Tq, D); k, v: (B, H / group, Tk, D), by strides, with adjacent columns; lse: (B, H, Tq)
    # float32; lengths: (B,) int32, read where PADDED. `scale` includes log2(e); with SOFTCAP it is the factor
    # of the tangents of scores times `inner`. sinks: (H,); slopes: (B, H) float32; bias: (B, H, Tq, Tk), by
    # strides, 0 where it is broadcast. Bytes: q read and out written once; k and v read once by each
    # tile of queries, mostly from the L2.
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
    if SINKS:  # one more score, which comes first and has no value
        top = tl.zeros((BM,), tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    shift = query_position(keys, tq, BOTTOM_RIGHT)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + batch * slopes_batch + head) * LOG2E
    first, unmasked_start, unmasked_end, last = key_bounds(start, keys, shift, window, BM, BN, CAUSAL, WINDOW)
    # Grouped-query attention: `group` adjacent query heads read one head of keys.
    kv_head = head // group
    # The loops are one body that is compiled for each: the window's edge (-1), the tiles between, for which
    # all mask code is removed (0), and the diagonal with the ragged end (1).
    for masked in tl.static_range(-1 if WINDOW else 0, 2):
        for key_start in tl.range(
            first if masked == -1 else unmasked_start if masked == 0 else unmasked_end,
            tl.minimum(unmasked_start, last) if masked == -1 else unmasked_end if masked == 0 else last,
            BN,
        ):
            key_start = tl.multiple_of(key_start, BN)
            k = load_tile(k_source, batch, kv_head, key_start, tk, k_batch, k_head, k_row, BN, D, DP, TMA)
            s = row_products(q, k)
            column = key_start + tl.arange(0, BN)
            if SOFTCAP:
                s = tanh(s * inner)
            factor = scale
            if ALIBI or BIAS:  # terms are added to scaled scores
                factor = 1.0
                s = with_terms(
                    s * scale, bias_ptr, batch, head, rows[:, None], column[None, :], start, key_start,
                    tq, keys, shift, slope,
                    bias_batch, bias_head, bias_row, bias_column, ALIBI, BIAS,
                )  # fmt: skip
            if masked != 0:
                seen = (column < keys)[None, :]
                if CAUSAL:
                    seen = seen & sees(rows[:, None], column[None, :], shift, window, WINDOW)
                s = tl.where(seen, s, float("-inf"))
            # At the top left every query sees the first key, so that no maximum is -inf after the first tile.
            higher = tl.maximum(top, tl.max(s, 1) * factor)
            pivot = higher
            if WINDOW or BOTTOM_RIGHT or BIAS:  # -inf - -inf would be NaN
                pivot = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s * factor - pivot[:, None])
            shrink = tl.exp2(top - pivot)
            total = total * shrink + tl.sum(p, 1)
            if DROPOUT:
                keep_mask = dropout_mask(
                    low, high, threshold, line, rows, key_start, tq, tk, BN, False, DROPOUT == BY_FOURS
                )
                p = tl.where(keep_mask, p, 0.0)
            v = load_tile(v_source, batch, kv_head, key_start, tk, v_batch, v_head, v_row, BN, D, DP, TMA)
            if masked != 0 and PADDED:  # values past a length may be NaN, and 0 times NaN is NaN
                v = tl.where((column < keys)[:, None], v, 0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            top = higher
    # A query that sees no key: an output of 0, and a log-sum-exp of -inf.
    total = tl.where(total == 0.0, 1.0, total)
    out = acc * (rescale / total)[:, None]
    store_tile(out_ptr, out, batch, head, start, tq, out_batch, out_head, out_row, BM, D, DP)
    lse = (top + tl.log2(total)) * LN2
    tl.store(lse_ptr + tl.cast(line, tl.int64) * tq + rows, lse, mask=rows < tq)
