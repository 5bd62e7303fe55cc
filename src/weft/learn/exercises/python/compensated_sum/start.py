"""Exercise: a sum in float32 that keeps the rounding errors."""


def compensated_sum(values):
    """Return the sum of float32 numbers."""
    total, lost = 0.0, 0.0
    for value in values:
        total = total + value
        lost += 0.0  # YOUR CODE: what did this addition lose?
    return total + lost
