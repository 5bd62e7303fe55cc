"""The usual mistake: half is added always, so that ties go up."""


def to_bfloat16(bits):
    """Return the 16 bits of the nearest bfloat16."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FC0
    return (bits + 0x8000) >> 16
