"""Right for large buffers only: small ones fit into the cache all together."""


def time_cold(device, kernel, nbytes, repeats):
    """Return the kernel's time on a cold buffer in microseconds."""
    kernel(device.allocate(nbytes))
    count = repeats
    buffers = [device.allocate(nbytes) for _ in range(count)]
    device.synchronize()
    start = device.now()
    for buffer in buffers[:repeats]:
        kernel(buffer)
    device.synchronize()
    return (device.now() - start) / repeats
