"""Attention's backward in Triton: scores are computed again from q, k and the log-sum-exp.

With p = exp(s - lse), dp = grad v^T and delta = rowsum(out grad): ds = p (dp - delta), dq = ds k,
dk = ds^T q and dv = p^T grad (FlashAttention-2, arXiv:2307.08691). Two kernels compute seven products where
one with atomics would compute five: one program sums each gradient in one order, so that the same inputs give
the same bits. The first kernel, over queries, stores delta for the second, over keys.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from weft.backends.triton_jit import tl, triton
from weft.ops.attention.triton_tiles import (
    BY_FOURS,
    LOG2E,
    dropout_mask,
    key_bounds,
    load_row_terms,
    load_tile,
    query_position,
    row_products,
    sees,
    store_tile,
    tanh,
    visible_keys,
    with_terms,
)

# Modes of DBIAS: how the queries' kernel returns the gradient of a bias.
WRITTEN = tl.constexpr(1)  # each element, by one program
ADDED = tl.constexpr(2)  # each element, of one batch a launch, added to that of the launches before
ROWS_SUMMED = tl.constexpr(3)  # sums over the queries of a program
COLUMNS_SUMMED = tl.constexpr(4)  # sums over the keys


@triton.jit
def store_bias_gradient(
    dbias_ptr, terms, rows, columns, tq, keys, first_batch, row_stride, MODE: tl.constexpr
):
    """Write a tile of a bias's gradient; with ADDED add it to that of the batches before."""
    at = dbias_ptr + (rows.to(tl.int64)[:, None] * row_stride + columns[None, :])
    inside = (rows < tq)[:, None] & (columns < keys)[None, :]
    if MODE == ADDED:
        terms += tl.load(at, mask=inside & (first_batch > 0), other=0.0)
    tl.store(at, terms.to(dbias_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["low", "high", "threshold", "window", "first_batch"])
def attention_backward_queries(
    q_source, k_source, v_source, grad_source, out_ptr, lengths, lse_ptr, rows_ptr, dq_ptr,
    heads, group, tq, tk, tq_padded,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, grad_batch, grad_head, grad_row,
    out_batch, out_head, out_row, dq_batch, dq_head, dq_row,
    sinks_ptr, slopes_ptr, bias_ptr, slopes_batch, bias_batch, bias_head, bias_row, bias_column,
    dsinks_ptr, dbias_ptr, first_batch, dbias_batch, dbias_head, dbias_row,
    scale, factor, inner, window, low, high, threshold, rescale,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PADDED: tl.constexpr, DROPOUT: tl.constexpr, TMA: tl.constexpr,
    SINKS: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, DBIAS: tl.constexpr,
):  # fmt: skip
    # q, grad, out, dq: (B, H, Tq, D); k, v: (B, H / group, Tk, D), by strides; lse: (B, H, Tq) float32. A
    # program computes dq of BM queries of one head, and writes two terms of each query into rows:
    # (B, H, 2, tq_padded) float32, log2(e) lse and delta; past Tq they are inf and 0: weights of 0.
    # `scale` includes log2(e), `factor` does not; with SOFTCAP `scale` is the factor of the tangents of
    # scores times `inner`. Terms of the scores as in the forward. dsinks: (B, H, programs) float32, each
    # program's part of a sink's gradient. DBIAS is one of the modes above, or 0: its buffer is 0 before
    # the launch, and `first_batch` is the number of the launch's first batch.
    head, batch = tl.program_id(1), tl.program_id(2)
    if DBIAS == ADDED:  # a launch for each batch
        batch += first_batch
    block = tl.program_id(0)
    if CAUSAL:  # blocks with most keys start first
        block = tl.num_programs(0) - 1 - block
    start = block * BM
    rows = start + tl.arange(0, BM)
    keys = visible_keys(lengths, batch, tk, PADDED)
    line = batch * heads + head
    q = load_tile(q_source, batch, head, start, tq, q_batch, q_head, q_row, BM, D, DP, TMA)
    grad = load_tile(grad_source, batch, head, start, tq, grad_batch, grad_head, grad_row, BM, D, DP, TMA)
    out = load_tile(out_ptr, batch, head, start, tq, out_batch, out_head, out_row, BM, D, DP, False)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse_ptr += tl.cast(line, tl.int64) * tq
    top = tl.load(lse_ptr + rows, mask=rows < tq, other=float("inf")) * LOG2E
    if SINKS or BIAS:  # a query that sees no key: weights of 0, where -inf - -inf would be NaN
        top = tl.where(top == float("-inf"), float("inf"), top)
    if SINKS:
        # p of the sink, whose score has the gradient p (0 - delta): it has no value.
        share = tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2E - top)
        tl.store(dsinks_ptr + line * tl.num_programs(0) + block, -tl.sum(share * delta, 0))
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + batch * slopes_batch + head) * LOG2E
    rows_ptr += tl.cast(line, tl.int64) * 2 * tq_padded
    tl.store(rows_ptr + rows, top)
    tl.store(rows_ptr + tq_padded + rows, delta)
    shift = query_position(keys, tq, BOTTOM_RIGHT)
    first, unmasked_start, unmasked_end, last = key_bounds(start, keys, shift, window, BM, BN, CAUSAL, WINDOW)
    dq = tl.zeros((BM, DP), tl.float32)
    if DBIAS:
        dbias_ptr += tl.cast(batch, tl.int64) * dbias_batch + tl.cast(head, tl.int64) * dbias_head
    row_sums = tl.zeros((BM,), tl.float32)
    kv_head = head // group
    for masked in tl.static_range(-1 if WINDOW else 0, 2):  # as in the forward
        for key_start in tl.range(
            first if masked == -1 else unmasked_start if masked == 0 else unmasked_end,
            tl.minimum(unmasked_start, last) if masked == -1 else unmasked_end if masked == 0 else last,
            BN,
        ):
            key_start = tl.multiple_of(key_start, BN)
            column = key_start + tl.arange(0, BN)
            k = load_tile(k_source, batch, kv_head, key_start, tk, k_batch, k_head, k_row, BN, D, DP, TMA)
            s = row_products(q, k)
            v = load_tile(v_source, batch, kv_head, key_start, tk, v_batch, v_head, v_row, BN, D, DP, TMA)
            dp = row_products(grad, v)
            if SOFTCAP:
                s = tanh(s * inner)
            x = s * scale
            if ALIBI or BIAS:
                x = with_terms(
                    x, bias_ptr, batch, head, rows[:, None], column[None, :], start, key_start,
                    tq, keys, shift, slope,
                    bias_batch, bias_head, bias_row, bias_column, ALIBI, BIAS,
                )  # fmt: skip
            p = tl.exp2(x - top[:, None])
            if DROPOUT:
                keep_mask = dropout_mask(
                    low, high, threshold, line, rows, key_start, tq, tk, BN, False, DROPOUT == BY_FOURS
                )
                dp = tl.where(keep_mask, dp * rescale, 0.0)
            ds = p * (dp - delta[:, None])
            if DBIAS:  # the bias is added behind the cap
                terms = ds
                if masked != 0:
                    seen = (column < keys)[None, :]
                    if CAUSAL:
                        seen = seen & sees(rows[:, None], column[None, :], shift, window, WINDOW)
                    terms = tl.where(seen, ds, 0.0)
                if DBIAS == COLUMNS_SUMMED:
                    row_sums += tl.sum(terms, 1)
                elif DBIAS == ROWS_SUMMED:
                    at = dbias_ptr + tl.cast(block, tl.int64) * dbias_row + column
                    tl.store(at, tl.sum(terms, 0), mask=column < keys)
                else:
                    store_bias_gradient(
                        dbias_ptr, terms, rows, column, tq, keys, first_batch, dbias_row, DBIAS
                    )
            if SOFTCAP:
                ds *= 1.0 - s * s
            if masked != 0:
                seen = (column < keys)[None, :]
                if CAUSAL:
                    seen = seen & sees(rows[:, None], column[None, :], shift, window, WINDOW)
                ds = tl.where(seen, ds, 0.0)
                if PADDED:  # keys past a length may be NaN, and 0 times NaN is NaN
                    k = tl.where((column < keys)[:, None], k, 0.0)
            # ds is rounded to the inputs' dtype, as tensor cores require; the sum stays in float32.
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    if DBIAS == COLUMNS_SUMMED:
        tl.store(dbias_ptr + rows, row_sums, mask=rows < tq)
    store_tile(dq_ptr, dq * factor, batch, head, start, tq, dq_batch, dq_head, dq_row, BM, D, DP)


@triton.jit(do_not_specialize=["low", "high", "threshold", "window"])
def attention_backward_keys(
    q_source, k_source, v_source, grad_source, lengths, rows_source, dk_ptr, dv_ptr,
    heads, group, tq, tk, tq_padded,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, grad_batch, grad_head, grad_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    slopes_ptr, bias_ptr, slopes_batch, bias_batch, bias_head, bias_row, bias_column,
    scale, factor, inner, window, low, high, threshold, rescale,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PADDED: tl.constexpr, DROPOUT: tl.constexpr, TMA: tl.constexpr,
    ALIBI: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    # Shapes as in attention_backward_queries, which wrote rows; dk, dv: (B, H / group, Tk, D). A program
    # computes BN keys of one head of keys, and reads the queries of its ``group`` heads BM at a time. Tiles
    # of scores are (keys, queries). Rows of different keys are independent: keys past a length are cleared at
    # the end.
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * BN
    columns = start + tl.arange(0, BN)
    keys = visible_keys(lengths, batch, tk, PADDED)
    k = load_tile(k_source, batch, kv_head, start, tk, k_batch, k_head, k_row, BN, D, DP, TMA)
    v = load_tile(v_source, batch, kv_head, start, tk, v_batch, v_head, v_row, BN, D, DP, TMA)
    dk = tl.zeros((BN, DP), tl.float32)
    dv = tl.zeros((BN, DP), tl.float32)
    shift = query_position(keys, tq, BOTTOM_RIGHT)
    first = 0
    masked_end = 0
    last = tq
    if PADDED:
        # A tile of keys past the length reads no query; its gradients stay 0.
        last = tl.where(start < keys, tq, 0)
    unmasked_end = last
    # Divisions are of numbers from 0 on: Triton's cut towards 0.
    if CAUSAL:
        first = tl.maximum(start - shift, 0) // BM * BM
        # From this query on every query sees all keys of the tile, so that the second loop needs no causal
        # mask.
        masked_end = tl.cdiv(tl.maximum(start + BN - 1 - shift, 0), BM) * BM
        masked_end = tl.minimum(masked_end, tl.cdiv(last, BM) * BM)
    if WINDOW:
        # Queries from the last bound on see no key of the tile; those from `unmasked_end` on not all keys.
        last = tl.minimum(last, tl.maximum(tl.minimum(start + BN, keys) - 1 - shift + window, 0))
        unmasked_end = tl.maximum(start - shift + window, 0) // BM * BM
        unmasked_end = tl.maximum(masked_end, unmasked_end)
    for member in range(group):
        head = kv_head * group + member
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes_ptr + batch * slopes_batch + head) * LOG2E
        line = batch * heads + head
        # The diagonal (0), tiles without a mask (1), the window's edge (2).
        for loop in tl.static_range(0 if CAUSAL else 1, 3 if WINDOW else 2):
            for row_start in tl.range(
                first if loop == 0 else masked_end if loop == 1 else unmasked_end,
                tl.minimum(masked_end if loop == 0 else unmasked_end if loop == 1 else last, last),
                BM,
            ):
                row_start = tl.multiple_of(row_start, BM)
                row = row_start + tl.arange(0, BM)
                q = load_tile(q_source, batch, head, row_start, tq, q_batch, q_head, q_row, BM, D, DP, TMA)
                s = row_products(k, q)
                # Past the last query: exp2(0 - inf) is 0, so that such rows add nothing.
                top = load_row_terms(rows_source, 2 * line, row_start, tq_padded, BM, TMA)
                if SOFTCAP:
                    s = tanh(s * inner)
                x = s * scale
                if ALIBI or BIAS:
                    x = with_terms(
                        x, bias_ptr, batch, head, row[None, :], columns[:, None], row_start, start,
                        tq, keys, shift, slope,
                        bias_batch, bias_head, bias_row, bias_column, ALIBI, BIAS,
                    )  # fmt: skip
                p = tl.exp2(x - top[None, :])
                if loop != 1:
                    p = tl.where(sees(row[None, :], columns[:, None], shift, window, WINDOW), p, 0.0)
                grad = load_tile(
                    grad_source, batch, head, row_start, tq, grad_batch, grad_head, grad_row, BM, D, DP, TMA
                )
                weights = p
                if DROPOUT:
                    keep_mask = dropout_mask(
                        low, high, threshold, line, row, start, tq, tk, BN, True, DROPOUT == BY_FOURS
                    )
                    weights = tl.where(keep_mask, p * rescale, 0.0)
                dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
                dp = row_products(v, grad)
                if DROPOUT:
                    dp = tl.where(keep_mask, dp * rescale, 0.0)
                delta = load_row_terms(rows_source, 2 * line + 1, row_start, tq_padded, BM, TMA)
                ds = p * (dp - delta[None, :])
                if SOFTCAP:
                    ds *= 1.0 - s * s
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    if PADDED:
        dk = tl.where((columns < keys)[:, None], dk, 0.0)
        dv = tl.where((columns < keys)[:, None], dv, 0.0)
    store_tile(dk_ptr, dk * factor, batch, kv_head, start, tk, dk_batch, dk_head, dk_row, BN, D, DP)
    store_tile(dv_ptr, dv, batch, kv_head, start, tk, dv_batch, dv_head, dv_row, BN, D, DP)
