"""How the embedding's backward is laid out: slices of columns, so that a gradient is read once.

Each row of the gradient is asked for twice, by its token's row and by its position's. All programs
of one slice of columns stand side by side in the grid: the slice comes from memory once and waits
in the L2 cache for whoever asks second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

# In Triton, rows asked for by more tokens than this are summed in pieces of as many (in sorted
# order), each to a float32 row of its own, and the pieces in their order by a second kernel.
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


@dataclass(frozen=True, kw_only=True)
class Sums:
    """How the CUDA backward goes.

    A lane moves ``access`` bytes at a time, and 32 lanes are a slice of columns. The first ``lead``
    slices' positions are summed beside the ordering of the tokens; later ones as far ahead of the
    tokens' sums. A warp has ``rows`` rows of the table and keeps ``flight`` of their tokens under
    way; what more than ``piece`` tokens ask for is summed in pieces of as many. ``last``: a token's
    reading lets go of its line in the L2. ``resident`` blocks a multiprocessor are made room for in
    registers; a block of ``owners`` warps orders the tokens of 32 rows a warp. The pieces of a
    slice have ``piece_blocks`` blocks at most: more come in turns.
    """

    access: int = 8
    lead: int = 2
    rows: int = 16
    piece: int = 16
    last: bool = True
    flight: int = 8
    resident: int = 3
    owners: int = 16
    piece_blocks: int = 64


# 512 bytes of a row at a time: an H200 prefers them to 256 even where two slices of the gradient do
# not stay in the L2 together, 87 us of 96.
WIDE = Sums(access=16, lead=1, flight=5)


def candidates() -> list[Sums]:
    """The plans worth timing, in the order of promise."""
    return [
        WIDE,
        replace(WIDE, flight=7),
        replace(WIDE, flight=12, resident=2),
        replace(WIDE, flight=4, resident=4),
        replace(WIDE, owners=32),
        replace(WIDE, owners=32, lead=0),
        replace(WIDE, lead=0),
        replace(WIDE, rows=24, flight=7),
        replace(WIDE, rows=8, piece=8),
        replace(WIDE, rows=16, piece=8),
        replace(WIDE, lead=2),
        Sums(lead=1),
    ]
