"""Exercise: sum a float16 row that is longer than a block."""

import triton
import triton.language as tl


@triton.jit
def row_sum_kernel(x_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    partial = tl.zeros((BLOCK,), dtype=tl.float32)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_cols + columns, mask=columns < n_cols, other=0.0)
    partial += x.to(tl.float32)
    tl.store(out_ptr + row, tl.sum(partial, axis=0))
