"""The usual mistake: a negative result is set to 0, which hides the cancellation."""


def variance(values):
    """Return the variance of an iterator's numbers."""
    n, total, squares = 0, 0.0, 0.0
    for x in values:
        n += 1
        total += x
        squares += x * x
    return max(squares / n - total / n * (total / n), 0.0)
