"""Answer: a buffer for each call, and together at least twice the L2."""


def time_cold(device, kernel, nbytes, repeats):
    """Return the kernel's time on a cold buffer in microseconds."""
    kernel(device.allocate(nbytes))
    count = max(repeats, -(-2 * device.l2_bytes // nbytes))
    buffers = [device.allocate(nbytes) for _ in range(count)]
    device.synchronize()
    start = device.now()
    for buffer in buffers[:repeats]:
        kernel(buffer)
    device.synchronize()
    return (device.now() - start) / repeats
