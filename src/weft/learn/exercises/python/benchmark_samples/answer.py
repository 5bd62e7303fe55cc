"""Answer: the middle sample, and the range of the middle half."""


def summary(samples):
    """Return (median, low, high)."""
    ordered = sorted(samples)
    n = len(ordered)
    median = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
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
