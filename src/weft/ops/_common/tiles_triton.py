"""Order of output tiles in Triton's matrix products."""

from __future__ import annotations

from weft.backends.triton_jit import tl, triton


@triton.jit
def tile_position(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Return (row, column) of a tile, in tiles. The order is bands of GROUP rows, each column by column, so
    that tiles in flight together share rows of one factor and columns of the other in the L2 cache."""
    # The last band may have fewer than GROUP rows of tiles: `height` is its size.
    in_band = GROUP * column_tiles
    band = tile // in_band
    first = band * GROUP
    height = min(row_tiles - first, GROUP)
    within = tile % in_band
    return first + within % height, within // height
