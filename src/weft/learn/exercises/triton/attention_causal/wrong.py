"""The usual mistake: the output so far is not rescaled when the maximum rises."""

import triton
import triton.language as tl


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, T, scale, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr
):
    first = tl.program_id(0) * BQ
    queries = first + tl.arange(0, BQ)
    dims = tl.arange(0, D)
    q = tl.load(q_ptr + queries[:, None] * D + dims[None, :], mask=queries[:, None] < T, other=0.0)
    m = tl.full((BQ,), float("-inf"), dtype=tl.float32)
    s = tl.zeros((BQ,), dtype=tl.float32)
    acc = tl.zeros((BQ, D), dtype=tl.float32)
    for start in range(0, tl.minimum(first + BQ, T), BK):
        keys = start + tl.arange(0, BK)
        k = tl.load(k_ptr + keys[:, None] * D + dims[None, :], mask=keys[:, None] < T, other=0.0)
        v = tl.load(v_ptr + keys[:, None] * D + dims[None, :], mask=keys[:, None] < T, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(keys[None, :] <= queries[:, None], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        p = tl.exp(scores - m_new[:, None])
        old = tl.exp(m - m_new)
        s = s * old + tl.sum(p, axis=1)
        acc = acc + tl.dot(p, v)
        m = m_new
    tl.store(o_ptr + queries[:, None] * D + dims[None, :], acc / s[:, None], mask=queries[:, None] < T)
