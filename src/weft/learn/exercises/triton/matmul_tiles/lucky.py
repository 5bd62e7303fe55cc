"""Nearly right for a short K of small numbers: a float16 accumulator."""

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float16)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a_inside = (rows[:, None] < M) & (k[None, :] < K)
        b_inside = (k[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :], mask=a_inside, other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + cols[None, :], mask=b_inside, other=0.0)
        acc += tl.dot(a, b).to(tl.float16)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=inside)
