"""Answer: a warm-up, and the queue empty at both readings of the clock."""


def time_kernel(device, kernel, buffer, repeats):
    """Return the kernel's time in microseconds."""
    kernel(buffer)
    device.synchronize()
    start = device.now()
    for _ in range(repeats):
        kernel(buffer)
    device.synchronize()
    return (device.now() - start) / repeats
