"""The backward's second kernel: dk and dv of a block of keys, over all queries that see them."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from weft.backends.triton_jit import tl, triton
from weft.ops.attention.tiles import is_kept, keys_of, numbers, store_tile, tile


@triton.jit
def toward_keys(
    dk,
    dv,
    k,
    v,
    q_source,
    grad_source,
    rows_source,
    batch,
    head,
    line,
    columns,
    first,
    last,
    tq,
    tk,
    tq_padded,
    q_batch,
    q_head,
    q_row,
    grad_batch,
    grad_head,
    grad_row,
    scale,
    low,
    high,
    threshold,
    rescale,
    BM: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    MASKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    TMA: tl.constexpr,
):
    """Add what the queries from ``first`` to ``last`` give; tiles of scores are (keys, queries)."""
    for start in tl.range(first, last, BM):
        start = tl.multiple_of(start, BM)
        row = start + tl.arange(0, BM)
        q = tile(q_source, batch, head, start, tq, q_batch, q_head, q_row, BM, D, DP, TMA)
        s = tl.dot(k, q.T, input_precision="ieee")
        # Past the last query: exp2(0 - inf) is 0, and such rows add nothing.
        top = numbers(rows_source, 2 * line, start, tq_padded, BM, TMA)
        p = tl.exp2(s * scale - top[None, :])
        if MASKED:
            p = tl.where(columns[:, None] <= row[None, :], p, 0.0)
        grad = tile(
            grad_source, batch, head, start, tq, grad_batch, grad_head, grad_row, BM, D, DP, TMA
        )
        given = p
        if DROPOUT:
            kept = is_kept(low, high, threshold, line, row[None, :], columns[:, None], tq, tk)
            given = tl.where(kept, p * rescale, 0.0)
        dv = tl.dot(given.to(grad.dtype), grad, dv, input_precision="ieee")
        dp = tl.dot(v, grad.T, input_precision="ieee")
        if DROPOUT:
            dp = tl.where(kept, dp * rescale, 0.0)
        delta = numbers(rows_source, 2 * line + 1, start, tq_padded, BM, TMA)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["low", "high", "threshold"])
def attention_backward_keys(
    q_source,
    k_source,
    v_source,
    grad_source,
    lengths,
    rows_source,
    dk_ptr,
    dv_ptr,
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
    dk_batch,
    dk_head,
    dk_row,
    dv_batch,
    dv_head,
    dv_row,
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
    # Shapes as in attention_backward_queries, which wrote rows; dk, dv: (B, H / group, Tk, D). A
    # program has BN keys of one head of keys, and walks the queries of its ``group`` heads BM at a
    # time. A key's row depends on no other key: what lies past a length is cut when it is stored.
    shared, batch = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * BN
    columns = start + tl.arange(0, BN)
    keys = keys_of(lengths, batch, tk, PADDED)
    k = tile(k_source, batch, shared, start, tk, k_batch, k_head, k_row, BN, D, DP, TMA)
    v = tile(v_source, batch, shared, start, tk, v_batch, v_head, v_row, BN, D, DP, TMA)
    dk = tl.zeros((BN, DP), tl.float32)
    dv = tl.zeros((BN, DP), tl.float32)
    first = 0
    clear = 0
    last = tq
    if PADDED:
        last = tl.where(start < keys, tq, 0)
    if CAUSAL:
        first = start // BM * BM
        clear = tl.minimum(tl.cdiv(start + BN - 1, BM) * BM, tl.cdiv(last, BM) * BM)
    for each in range(group):
        head = shared * group + each
        line = batch * heads + head
        for unmasked in tl.static_range(0 if CAUSAL else 1, 2):
            dk, dv = toward_keys(
                dk,
                dv,
                k,
                v,
                q_source,
                grad_source,
                rows_source,
                batch,
                head,
                line,
                columns,
                clear if unmasked else first,
                last if unmasked else tl.minimum(clear, last),
                tq,
                tk,
                tq_padded,
                q_batch,
                q_head,
                q_row,
                grad_batch,
                grad_head,
                grad_row,
                scale,
                low,
                high,
                threshold,
                rescale,
                BM,
                D,
                DP,
                unmasked == 0,
                DROPOUT,
                TMA,
            )
    if PADDED:
        dk = tl.where((columns < keys)[:, None], dk, 0.0)
        dv = tl.where((columns < keys)[:, None], dv, 0.0)
    store_tile(dk_ptr, dk * factor, batch, shared, start, tk, dk_batch, dk_head, dk_row, BN, D, DP)
    store_tile(dv_ptr, dv, batch, shared, start, tk, dv_batch, dv_head, dv_row, BN, D, DP)
