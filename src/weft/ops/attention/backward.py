"""Attention's backward in Triton: scores made again from the log-sum-exp, none of them written.

With p = exp(s - lse), dp = grad v^T and delta = rowsum(out grad): ds = p (dp - delta), dq = ds k,
dk = ds^T q and dv = p^T grad (FlashAttention-2, arXiv:2307.08691). Two kernels make seven products
where one with atomics would make five: each gradient is summed by one program in one order, so that
the same inputs give the same bits. The first, over queries, leaves delta for the second, over keys.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from weft.backends.triton_jit import tl, triton
from weft.ops.attention.tiles import LOG2E, is_kept, keys_of, store_tile, tile


@triton.jit
def toward_queries(
    dq,
    q,
    grad,
    top,
    delta,
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
    rescale,
    BN: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    DROPOUT: tl.constexpr,
    TMA: tl.constexpr,
):
    """Add what the keys from ``first`` to ``last`` give to dq; ``scale`` has log2(e) in it."""
    for start in tl.range(first, last, BN):
        start = tl.multiple_of(start, BN)
        column = start + tl.arange(0, BN)
        k = tile(k_source, batch, head, start, tk, k_batch, k_head, k_row, BN, D, DP, TMA)
        s = tl.dot(q, k.T, input_precision="ieee")
        v = tile(v_source, batch, head, start, tk, v_batch, v_head, v_row, BN, D, DP, TMA)
        dp = tl.dot(grad, v.T, input_precision="ieee")
        p = tl.exp2(s * scale - top[:, None])
        if DROPOUT:
            kept = is_kept(low, high, threshold, line, rows[:, None], column[None, :], tq, tk)
            dp = tl.where(kept, dp * rescale, 0.0)
        ds = p * (dp - delta[:, None])
        if MASKED:
            seen = (column < keys)[None, :]
            if CAUSAL:
                seen = seen & (column[None, :] <= rows[:, None])
            ds = tl.where(seen, ds, 0.0)
            if PADDED:  # what stands past a length may be anything: 0 times NaN is NaN
                k = tl.where((column < keys)[:, None], k, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["low", "high", "threshold"])
def attention_backward_queries(
    q_source,
    k_source,
    v_source,
    grad_source,
    out_ptr,
    lengths,
    lse_ptr,
    rows_ptr,
    dq_ptr,
    heads,
    group,
    tq,
    tk,
    tq_padded,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    grad_batch,
    grad_head,
    grad_row,
    out_batch,
    out_head,
    out_row,
    dq_batch,
    dq_head,
    dq_row,
    scale,
    factor,
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
    # q, grad, out, dq: (B, H, Tq, D); k, v: (B, H / group, Tk, D), by strides; lse: (B, H, Tq)
    # float32. A program has BM queries of one head; it writes their dq, and their two numbers into
    # rows: (B, H, 2, Tq padded) float32, log2(e) lse and delta, past Tq inf and 0.
    head, batch = tl.program_id(1), tl.program_id(2)
    block = tl.program_id(0)
    if CAUSAL:  # the longest first
        block = tl.num_programs(0) - 1 - block
    start = block * BM
    rows = start + tl.arange(0, BM)
    keys = keys_of(lengths, batch, tk, PADDED)
    line = batch * heads + head
    q = tile(q_source, batch, head, start, tq, q_batch, q_head, q_row, BM, D, DP, TMA)
    grad = tile(
        grad_source, batch, head, start, tq, grad_batch, grad_head, grad_row, BM, D, DP, TMA
    )
    out = tile(out_ptr, batch, head, start, tq, out_batch, out_head, out_row, BM, D, DP, False)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse_ptr += tl.cast(line, tl.int64) * tq
    top = tl.load(lse_ptr + rows, mask=rows < tq, other=float("inf")) * LOG2E
    rows_ptr += tl.cast(line, tl.int64) * 2 * tq_padded
    tl.store(rows_ptr + rows, top)
    tl.store(rows_ptr + tq_padded + rows, delta)
    last = keys
    clear = keys // BN * BN
    if CAUSAL:
        last = tl.minimum(keys, start + BM)
        clear = tl.minimum(clear, (start + 1) // BN * BN)
    dq = tl.zeros((BM, DP), tl.float32)
    for masked in tl.static_range(2):
        dq = toward_queries(
            dq,
            q,
            grad,
            top,
            delta,
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
            rescale,
            BN,
            D,
            DP,
            masked == 1,
            CAUSAL,
            PADDED,
            DROPOUT,
            TMA,
        )
    store_tile(dq_ptr, dq * factor, batch, head, start, tq, dq_batch, dq_head, dq_row, BM, D, DP)
