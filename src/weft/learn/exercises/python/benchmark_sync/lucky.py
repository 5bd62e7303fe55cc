"""Right on an idle device only: work that was queued before is in the time."""


def time_kernel(device, kernel, buffer, repeats):
    """Return the kernel's time in microseconds."""
    kernel(buffer)
    start = device.now()
    for _ in range(repeats):
        kernel(buffer)
    device.synchronize()
    return (device.now() - start) / repeats
