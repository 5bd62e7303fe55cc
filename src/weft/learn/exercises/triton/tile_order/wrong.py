"""The usual mistake: rows and columns of a group are exchanged, so that it is walked row by row."""


def tile_of(pid, tiles_m, tiles_n, group):
    """Return the tile (i, j) of program ``pid``."""
    first = pid // (group * tiles_n) * group
    position = pid - first * tiles_n
    return first + position // tiles_n, position % tiles_n


def touched(tiles):
    """Return the number of different rows plus the number of different columns."""
    return len({i for i, _ in tiles}) + len({j for _, j in tiles})
