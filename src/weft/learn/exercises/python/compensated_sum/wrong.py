"""The usual mistake: the loss is subtracted with the wrong sign."""


def compensated_sum(values):
    """Return the sum of float32 numbers."""
    total, lost = 0.0, 0.0
    for value in values:
        t = total + value
        value_seen = t - total
        total_seen = t - value_seen
        lost -= (total - total_seen) + (value - value_seen)
        total = t
    return total + lost
