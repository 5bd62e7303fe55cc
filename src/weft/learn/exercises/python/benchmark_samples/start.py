"""Exercise: summarise noisy samples."""


def summary(samples):
    """Return (median, low, high)."""
    mean = sum(samples) / len(samples)  # YOUR CODE
    return mean, min(samples), max(samples)


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
