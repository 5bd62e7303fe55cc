"""Answer: Welford's update."""


def variance(values):
    """Return the variance of an iterator's numbers."""
    n, mean, s = 0, 0.0, 0.0
    for x in values:
        n += 1
        d = x - mean
        mean += d / n
        s += d * (x - mean)
    return s / n
