"""Right while the sum is larger than each value: the short form of the loss."""


def compensated_sum(values):
    """Return the sum of float32 numbers."""
    total, lost = 0.0, 0.0
    for value in values:
        t = total + value
        value_seen = t - total
        lost += value - value_seen
        total = t
    return total + lost
