"""The usual mistake: no barrier after the products, so that the next copy overtakes slow threads."""

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
        a_tile[y * t + x] = float32(0)
        b_tile[y * t + x] = float32(0)
        if row < a.shape[0] and start + x < a.shape[1]:
            a_tile[y * t + x] = a[row, start + x]
        if start + y < b.shape[0] and col < b.shape[1]:
            b_tile[y * t + x] = b[start + y, col]
        cuda.syncthreads()
        for k in range(t):
            total += a_tile[y * t + k] * b_tile[k * t + x]
    if row < c.shape[0] and col < c.shape[1]:
        c[row, col] = total
