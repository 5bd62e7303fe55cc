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
    slice of columns. ``together``: places and rows of the table are summed in one walk over places,
    where there are positions; see together.cu. ``flight`` rows of the gradient are under way in
    a group, ``resident`` blocks a multiprocessor are made room for in registers, and a block of
    ``owners`` warps orders the tokens of 32 rows a warp. What more than ``piece`` tokens ask for is
    summed in pieces, by ``piece_blocks`` blocks at most (apart: a slice's): more come in turns.

    ``warps``: of a block that walks. ``early``: of a warp's sequences, for whose rows the L2 is
    asked at its start. ``overlap``: what orders and what walks is launched before the kernel in
    front of it has ended, and waits for it.

    Apart, a group has ``rows`` rows of the table, fewer than its lanes; the first ``lead`` slices'
    positions are summed beside the ordering of the tokens, and later ones as far ahead of the
    tokens' sums. ``last``: a token's reading lets go of its line in the L2.
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
    together: bool = False
    warps: int = 8
    early: int = 0
    overlap: bool = False


# 512 bytes of a row at a time: an H200 prefers them to 256 a warp even where a slice of the
# gradient does not stay in the L2.
WIDE = Sums(access=16, lead=0, flight=5)
# 256 bytes of two rows at a time: as few instructions a byte, and slices of half the size. See
# results' sweep-embedding.ndjson.
TWO = Sums(access=16, lanes=16, lead=1, rows=8, flight=5, piece_blocks=32)
# A row of the gradient is read once for its place and its token, and again only where another token
# asked first. On an H200 half a warp a row is the faster by little where ids are uniform, and a
# whole one by more where they are as words are: results' sweep-finals-2026-11-22.ndjson. Small
# blocks, launches that overlap and rows asked for early: sweep-embedding-bias_gelu-2026-11-22b.
TOGETHER = Sums(
    access=16, lanes=32, lead=0, rows=8, flight=6, resident=6, owners=8, piece_blocks=528,
    together=True, warps=4, early=8, overlap=True,
)  # fmt: skip
# The same in blocks of twice the size, half as many at once.
COARSE = replace(TOGETHER, resident=3, piece_blocks=264, warps=8)


def shipped(places: int) -> Sums:
    """Without positions every row of the gradient is asked for once, and nothing need stay."""
    return TOGETHER if places else WIDE


def candidates() -> list[Sums]:
    """The plans worth timing, in the order of promise."""
    return [
        TOGETHER,
        COARSE,
        replace(TOGETHER, overlap=False),
        replace(TOGETHER, early=0),
        replace(COARSE, overlap=False),
        replace(COARSE, early=0),
        replace(TOGETHER, owners=16),
        replace(TOGETHER, flight=4, resident=8),
        replace(TOGETHER, lanes=16, flight=4, resident=8),
        replace(TOGETHER, lanes=16, flight=5, resident=8),
        replace(TOGETHER, lanes=16, flight=4, resident=8, piece=8),
        TWO,
        replace(TWO, lead=0, last=False),
        replace(TWO, flight=4, resident=4),
        replace(TWO, flight=4, resident=4, lead=0, last=False),
        WIDE,
    ]
