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

    A lane moves ``access`` bytes at a time, and ``lanes`` of a warp, 32 or 16, are a group and a
    slice of columns. The first ``lead`` slices' positions are summed beside the ordering of the
    tokens; later ones as far ahead of the tokens' sums. A group has ``rows`` rows of the table,
    fewer than its lanes, and keeps ``flight`` of their tokens under way; what more than ``piece``
    tokens ask for is summed in pieces of as many. ``last``: a token's reading lets go of its line
    in the L2. ``resident`` blocks a multiprocessor are made room for in registers; a block of
    ``owners`` warps orders the tokens of 32 rows a warp. The pieces of a slice have
    ``piece_blocks`` blocks at most: more come in turns.
    """

    access: int = 8
    lanes: int = 32
    lead: int = 2
    rows: int = 16
    piece: int = 16
    last: bool = True
    flight: int = 8
    resident: int = 3
    owners: int = 16
    piece_blocks: int = 64


# 512 bytes of a row at a time: an H200 prefers them to 256 a warp even where a slice of the
# gradient does not stay in the L2.
WIDE = Sums(access=16, lead=0, flight=5)
# 256 bytes of two rows at a time: as few instructions a byte, and slices of half the size. On an
# H200 85 us of 87 where ids are uniform, 192 of 215 where they are as words are.
TWO = Sums(access=16, lanes=16, lead=1, rows=8, flight=5, piece_blocks=32)


def shipped(places: int) -> Sums:
    """Without positions every row of the gradient is asked for once, and nothing need stay."""
    return TWO if places else WIDE


def candidates() -> list[Sums]:
    """The plans worth timing, in the order of promise."""
    return [
        TWO,
        replace(TWO, lead=0, last=False),
        replace(TWO, lead=0),
        replace(TWO, rows=12, flight=6),
        WIDE,
        replace(TWO, lead=2),
        replace(TWO, lead=1, last=False),
        replace(TWO, flight=4, resident=4),
        replace(TWO, owners=32),
        replace(TWO, flight=7),
        replace(TWO, rows=4, flight=4),
        replace(WIDE, lead=1),
        replace(WIDE, last=False),
        replace(WIDE, owners=32),
        replace(TWO, rows=12, lead=0, last=False),
    ]
