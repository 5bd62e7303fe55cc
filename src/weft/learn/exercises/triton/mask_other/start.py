"""Exercise: the largest element and the sum of a row."""

import triton
import triton.language as tl


@triton.jit
def max_and_sum_kernel(x_ptr, max_ptr, sum_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n_cols
    x = tl.load(x_ptr + row * n_cols + columns, mask=inside, other=1.0)
    tl.store(max_ptr + row, tl.max(x, axis=0))
    tl.store(sum_ptr + row, tl.sum(x, axis=0))
