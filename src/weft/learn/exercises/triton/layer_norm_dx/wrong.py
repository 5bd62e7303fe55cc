"""The usual mistake: the gradient through the variance is missing."""

import triton
import triton.language as tl


@triton.jit
def layer_norm_dx_kernel(g_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n_cols
    g = tl.load(g_ptr + row * n_cols + columns, mask=inside, other=0.0)
    w = tl.load(w_ptr + columns, mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + row)
    h = g * w
    c1 = tl.sum(h, axis=0) / n_cols
    dx = rstd * (h - c1)
    tl.store(dx_ptr + row * n_cols + columns, dx, mask=inside)
