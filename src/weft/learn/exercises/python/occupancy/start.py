"""Exercise: how many blocks fit on an SM."""

THREADS, REGISTERS, SHARED, BLOCKS = 2048, 65536, 233472, 32  # of an SM


def resident_blocks(threads, registers, shared):
    """Return how many blocks fit on an SM."""
    return THREADS // threads  # YOUR CODE: this is one of the four limits


def occupancy(threads, registers, shared):
    """Return resident warps / 64."""
    return resident_blocks(threads, registers, shared) * -(-threads // 32) / 64
