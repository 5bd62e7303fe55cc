"""The usual mistake: the lane is the counter, so that every block has the same mask."""

import triton
import triton.language as tl


@triton.jit
def dropout_kernel(x_ptr, y_ptr, n, p, seed, BLOCK: tl.constexpr):
    positions = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = positions < n
    x = tl.load(x_ptr + positions, mask=inside)
    r = tl.rand(seed, tl.arange(0, BLOCK))
    tl.store(y_ptr + positions, tl.where(r >= p, x / (1 - p), 0.0), mask=inside)


@triton.jit
def dropout_backward_kernel(dy_ptr, dx_ptr, n, p, seed, BLOCK: tl.constexpr):
    positions = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = positions < n
    dy = tl.load(dy_ptr + positions, mask=inside)
    r = tl.rand(seed, tl.arange(0, BLOCK))
    tl.store(dx_ptr + positions, tl.where(r >= p, dy / (1 - p), 0.0), mask=inside)
