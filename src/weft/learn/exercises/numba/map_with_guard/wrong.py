"""The usual mistake: every block works on the elements of the first."""

from numba import cuda


@cuda.jit
def axpy_kernel(a, x, y, out):
    i = cuda.threadIdx.x
    if i < out.size:
        out[i] = a * x[i] + y[i]
