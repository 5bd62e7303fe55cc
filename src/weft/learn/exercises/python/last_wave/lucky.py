"""Right for one block an SM only."""


def waves(blocks, sms, resident):
    """Return the number of waves."""
    return -(-blocks // sms)


def loss(blocks, sms, resident):
    """Return the share of unused places in all waves."""
    return 1 - blocks / (waves(blocks, sms, resident) * sms * resident)


def best(tiles, sms, resident):
    """Return the pair (blocks, work of a block) with the smallest time."""
    return min(tiles, key=lambda tile: waves(tile[0], sms, resident) * tile[1])
