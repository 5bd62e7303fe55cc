"""Exercise: a matrix product with tiles in dynamic shared memory."""

from numba import cuda, float32


@cuda.jit
def product_kernel(a, b, c):
    memory = cuda.shared.array(0, float32)
    t = cuda.blockDim.x
    a_tile = memory[: t * t]
    b_tile = memory[t * t : 2 * t * t]
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row, col = cuda.blockIdx.y * t + y, cuda.blockIdx.x * t + x
    total = float32(0)
    for start in range(0, a.shape[1], t):
        # YOUR CODE: copy two tiles, wait, add t products, wait
        a_tile[y * t + x] = float32(start)
        b_tile[y * t + x] = float32(start)
    if row < c.shape[0] and col < c.shape[1]:
        c[row, col] = total
