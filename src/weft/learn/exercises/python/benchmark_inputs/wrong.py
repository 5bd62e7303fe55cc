"""The usual mistake: a few buffers in turn, which a kernel that remembers addresses has seen."""


def time_cold(device, kernel, nbytes, repeats):
    """Return the kernel's time on a cold buffer in microseconds."""
    kernel(device.allocate(nbytes))
    count = 1 + -(-2 * device.l2_bytes // nbytes)
    buffers = [device.allocate(nbytes) for _ in range(count)]
    device.synchronize()
    start = device.now()
    for i in range(repeats):
        kernel(buffers[i % count])
    device.synchronize()
    return (device.now() - start) / repeats
