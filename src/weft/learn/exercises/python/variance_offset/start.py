"""Exercise: the variance of a stream of float32 numbers."""


def variance(values):
    """Return the variance of an iterator's numbers."""
    n, total, squares = 0, 0.0, 0.0
    for x in values:
        n += 1
        total += x
        squares += x * x
    return squares / n - total / n * (total / n)  # YOUR CODE: this fails far from 0
