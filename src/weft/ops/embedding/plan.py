"""How the embedding's backward is laid out: slices of columns, so that a gradient is read once.

Each row of the gradient is asked for twice, by its token's row and by its position's. All programs
of one slice of columns stand side by side in the grid: the slice comes from memory once and waits
in the L2 cache for whoever asks second.
"""

from __future__ import annotations

from functools import cache

# Rows asked for by more tokens than this are summed in pieces of as many (in sorted order), each to
# a float32 row of its own, and the pieces in their order by a second kernel.
PIECE = 32
CACHED = 32 << 20  # bytes of gradient that a slice may have: half of an H200's L2 cache
NARROWEST, WIDEST = 512, 2048  # bytes of a row that a program moves at a time


@cache
def slice_width(tokens: int, columns: int, itemsize: int, places: int) -> int:
    """Columns of a slice, a power of two: 512 to 2048 bytes, and ``CACHED`` where it is needed.

    Without positions every row of the gradient is asked for once, and slices need not wait.
    """
    width = NARROWEST
    while width < min(WIDEST, columns * itemsize):
        if 2 * width * tokens > CACHED and places:
            break
        if -(-columns * itemsize // (2 * width)) * 2 * width > 1.25 * columns * itemsize:
            break  # a third of the lanes would move nothing
        width *= 2
    return width // itemsize
