"""Exercise: GELU in tanh form, for every finite x."""

import triton
import triton.language as tl


@triton.jit
def gelu_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    positions = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = positions < n
    x = tl.load(x_ptr + positions, mask=inside, other=0.0)
    u = 0.7978845608 * (x + 0.044715 * x * x * x)
    t = tl.exp(2 * u)
    y = 0.5 * x * (1 + (t - 1) / (t + 1))
    tl.store(y_ptr + positions, y, mask=inside)
