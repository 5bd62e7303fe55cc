"""Exercise: the sum of a block's elements, in shared memory."""

from numba import cuda, float32


@cuda.jit
def block_sum_kernel(x, out):
    s = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    s[t] = x[i] if i < x.size else float32(0)
    cuda.syncthreads()
    # YOUR CODE: add up s, in steps
    if t == 0:
        out[cuda.blockIdx.x] = s[0]
