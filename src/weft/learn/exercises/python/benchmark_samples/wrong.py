"""The usual mistake: the mean of the samples."""


def summary(samples):
    """Return (median, low, high)."""
    ordered = sorted(samples)
    n = len(ordered)
    median = sum(ordered) / n
    return median, ordered[n // 4], ordered[n - 1 - n // 4]


def time_robust(device, kernel, buffer, repeats):
    """Return the median time of a call in microseconds."""
    kernel(buffer)
    samples = []
    for _ in range(repeats):
        device.synchronize()
        start = device.now()
        kernel(buffer)
        device.synchronize()
        samples.append(device.now() - start)
    return summary(samples)[0]
