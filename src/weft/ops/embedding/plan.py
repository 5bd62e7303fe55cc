"""Plans of the embedding's backward: slices of columns, so that the gradient comes from memory once.

Each row of the gradient is read twice, for its token's row and for its position's. All programs of one slice
of columns are neighbours in the grid: the slice comes from memory once, and the second read hits the L2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

# In Triton, rows with more tokens than this are summed in pieces of this many sorted tokens, each to its own
# float32 row; a second kernel adds the pieces in their order.
PIECE = 32
CACHED = 32 << 20  # bytes of gradient of a slice: half of an H200's L2 cache
MIN_SLICE, MAX_SLICE = 512, 2048  # bytes of a row that a program moves at a time


@cache
def slice_width(tokens: int, columns: int, itemsize: int, places: int) -> int:
    """Return the columns of a slice, a power of two: 512 to 2048 bytes, and at most ``CACHED`` with
    positions.

    Without positions every row of the gradient is read once, and slices need not stay in the L2.
    """
    width = MIN_SLICE
    while width < min(MAX_SLICE, columns * itemsize):
        if 2 * width * tokens > CACHED and places:
            break
        if -(-columns * itemsize // (2 * width)) * 2 * width > 1.25 * columns * itemsize:
            break  # more than a fifth of the lanes would be idle
        width *= 2
    return width // itemsize


@dataclass(frozen=True, kw_only=True)
class BackwardPlan:
    """Configuration of the CUDA backward.

    A lane moves ``access`` bytes at a time; ``lanes`` lanes of a warp, 32 or 16, are a group and process one
    slice of columns. A group has ``flight`` gradient rows in flight. ``resident`` blocks of an SM bound the
    registers of a thread. A block of ``owners`` warps sorts the tokens of 32 table rows for each warp. Rows
    with more than ``piece`` tokens are summed in pieces, by at most ``piece_blocks`` blocks (without
    ``fused``: of each slice).

    ``fused``: one loop over positions sums both gradients, if there are positions; see embedding_backward.cu.
    Its blocks have ``warps`` warps, and a warp prefetches the rows of ``early`` sequences into the L2 when it
    starts. ``overlap``: the sort and the sums are launched before the previous kernel has ended, and wait for
    it.

    Without ``fused`` a group sums ``rows`` table rows, fewer than its lanes. The positions of the first
    ``lead`` slices are summed beside the sort, and those of later slices equally far ahead of the tokens.
    ``last``: the last read of a token evicts its line from the L2 first.
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
    fused: bool = False
    warps: int = 8
    early: int = 0
    overlap: bool = False


# 512 bytes of a row at a time: an H200 prefers them to 256 a warp even where a slice of the
# gradient does not stay in the L2.
WIDE = BackwardPlan(access=16, lead=0, flight=5)
# 256 bytes of two rows at a time: as few instructions for each byte, and slices of half the size
# (results/nvidia-h200/sweep-embedding.ndjson).
TWO = BackwardPlan(access=16, lanes=16, lead=1, rows=8, flight=5, piece_blocks=32)
# A row of the gradient is read once for its position and its token, and again only if its id occurred
# earlier. On an H200 half a warp for each row is slightly faster for uniform ids, and a whole warp is clearly
# faster for Zipf ids (results/nvidia-h200/sweep-finals-2026-11-22.ndjson). Small blocks, overlapping launches
# and early prefetches: sweep-embedding-bias_gelu-2026-11-22b.ndjson.
FUSED = BackwardPlan(
    access=16, lanes=32, lead=0, rows=8, flight=6, resident=6, owners=8, piece_blocks=528,
    fused=True, warps=4, early=8, overlap=True,
)  # fmt: skip
# The same in blocks of twice the size, half as many resident.
COARSE = replace(FUSED, resident=3, piece_blocks=264, warps=8)


def shipped(places: int) -> BackwardPlan:
    """Return the shipped plan: without positions every row of the gradient is read once."""
    return FUSED if places else WIDE


def candidates() -> list[BackwardPlan]:
    """Return the plans worth timing, the most promising first."""
    return [
        FUSED,
        COARSE,
        replace(FUSED, overlap=False),
        replace(FUSED, early=0),
        replace(COARSE, overlap=False),
        replace(COARSE, early=0),
        replace(FUSED, owners=16),
        replace(FUSED, flight=4, resident=8),
        replace(FUSED, lanes=16, flight=4, resident=8),
        replace(FUSED, lanes=16, flight=5, resident=8),
        replace(FUSED, lanes=16, flight=4, resident=8, piece=8),
        TWO,
        replace(TWO, lead=0, last=False),
        replace(TWO, flight=4, resident=4),
        replace(TWO, flight=4, resident=4, lead=0, last=False),
        WIDE,
    ]
