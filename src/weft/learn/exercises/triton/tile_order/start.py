"""Exercise: a grouped order of tiles, and the tiles that it touches."""


def tile_of(pid, tiles_m, tiles_n, group):
    """Return the tile (i, j) of program ``pid``."""
    return divmod(pid, tiles_n)  # YOUR CODE: this is the order row by row


def touched(tiles):
    """Return the number of different rows plus the number of different columns."""
    return 0  # YOUR CODE
