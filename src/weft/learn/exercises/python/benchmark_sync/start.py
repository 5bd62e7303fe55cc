"""Exercise: mend a benchmark that reads its clock at the wrong moments."""


def time_kernel(device, kernel, buffer, repeats):
    """Return the kernel's time in microseconds."""
    start = device.now()
    for _ in range(repeats):
        kernel(buffer)
    return (device.now() - start) / repeats
