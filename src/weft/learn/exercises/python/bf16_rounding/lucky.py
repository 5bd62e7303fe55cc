"""Right for numbers only: a NaN can become infinity."""


def to_bfloat16(bits):
    """Return the 16 bits of the nearest bfloat16."""
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
