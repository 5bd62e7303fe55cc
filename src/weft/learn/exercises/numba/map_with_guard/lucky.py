"""Right where the block size divides n only: there is no guard."""

from numba import cuda


@cuda.jit
def axpy_kernel(a, x, y, out):
    i = cuda.grid(1)
    out[i] = a * x[i] + y[i]
