"""Answer: the last group's own number of rows."""


def tile_of(pid, tiles_m, tiles_n, group):
    """Return the tile (i, j) of program ``pid``."""
    first = pid // (group * tiles_n) * group
    rows = min(group, tiles_m - first)
    position = pid - first * tiles_n
    return first + position % rows, position // rows


def touched(tiles):
    """Return the number of different rows plus the number of different columns."""
    return len({i for i, _ in tiles}) + len({j for _, j in tiles})
