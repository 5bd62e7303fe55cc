"""Exercise: round a float32 to a bfloat16."""


def to_bfloat16(bits):
    """Return the 16 bits of the nearest bfloat16."""
    return bits >> 16  # YOUR CODE: this cuts the lower half off
