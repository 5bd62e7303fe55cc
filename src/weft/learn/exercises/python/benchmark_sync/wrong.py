"""The usual mistake: no warm-up, so that the compilation is in the time."""


def time_kernel(device, kernel, buffer, repeats):
    """Return the kernel's time in microseconds."""
    device.synchronize()
    start = device.now()
    for _ in range(repeats):
        kernel(buffer)
    device.synchronize()
    return (device.now() - start) / repeats
