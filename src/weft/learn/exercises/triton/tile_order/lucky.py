"""Right where group divides the number of rows: the last group counts as full."""


def tile_of(pid, tiles_m, tiles_n, group):
    """Return the tile (i, j) of program ``pid``."""
    first = pid // (group * tiles_n) * group
    rows = group
    position = pid - first * tiles_n
    return first + position % rows, position // rows


def touched(tiles):
    """Return the number of different rows plus the number of different columns."""
    return len({i for i, _ in tiles}) + len({j for _, j in tiles})
