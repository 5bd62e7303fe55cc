"""Exercise: out = a * x + y with one thread for each element."""

from numba import cuda


@cuda.jit
def axpy_kernel(a, x, y, out):
    i = cuda.threadIdx.x
    out[i] = a * x[i]  # YOUR CODE
