"""Right while the first value is a usual one: it is subtracted from all."""


def variance(values):
    """Return the variance of an iterator's numbers."""
    first, n, total, squares = None, 0, 0.0, 0.0
    for x in values:
        first = x if first is None else first
        n += 1
        total += x - first
        squares += (x - first) * (x - first)
    return squares / n - total / n * (total / n)
