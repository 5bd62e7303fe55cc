"""Answer: four limits, with the three roundings."""

THREADS, REGISTERS, SHARED, BLOCKS = 2048, 65536, 233472, 32  # of an SM


def resident_blocks(threads, registers, shared):
    """Return how many blocks fit on an SM."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256
    by_threads = THREADS // 32 // warps
    by_registers = REGISTERS // per_warp // warps
    by_shared = SHARED // (shared + 1024)
    return min(by_threads, by_registers, by_shared, BLOCKS)


def occupancy(threads, registers, shared):
    """Return resident warps / 64."""
    return resident_blocks(threads, registers, shared) * -(-threads // 32) / 64
