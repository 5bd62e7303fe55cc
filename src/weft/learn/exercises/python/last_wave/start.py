"""Exercise: waves of blocks, and what the last one costs."""


def waves(blocks, sms, resident):
    """Return the number of waves."""
    return blocks / (sms * resident)  # YOUR CODE: a wave with one block is a wave


def loss(blocks, sms, resident):
    """Return the share of unused places in all waves."""
    return 0.0  # YOUR CODE


def best(tiles, sms, resident):
    """Return the pair (blocks, work of a block) with the smallest time."""
    return tiles[0]  # YOUR CODE
