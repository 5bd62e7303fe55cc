"""What attention's Triton kernels share: tiles of a (B, H, T, D) tensor, and what a mask hides."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from weft.backends.triton_jit import tl, triton
from weft.ops._shared.philox_triton import philox

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile(
    source,
    batch,
    head,
    start,
    length,
    by_batch,
    by_head,
    by_row,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows start to start + ROWS of one head, (ROWS, DP); 0 past ``length`` and past column D.

    ``source`` is a tensor descriptor where TMA, which knows its own bounds; else a pointer.
    """
    if TMA:
        found = tl.reshape(source.load([batch, head, start, 0]), (ROWS, DP))
    else:
        row = tl.arange(0, ROWS)
        column = tl.arange(0, DP)
        base = source + tl.cast(batch, tl.int64) * by_batch + tl.cast(head, tl.int64) * by_head
        base += tl.cast(start, tl.int64) * by_row
        at = base + (row.to(tl.int64)[:, None] * by_row + column[None, :])
        inside = (start + row < length)[:, None]
        if DP != D:
            inside = inside & (column < D)[None, :]
        found = tl.load(at, mask=inside, other=0.0)
    return found


@triton.jit
def numbers(source, line, start, length, ROWS: tl.constexpr, TMA: tl.constexpr):
    """ROWS numbers from ``start`` of a line of (lines, length) float32, all within it.

    By the copy engine a thread holds no addresses for them: 60 registers of the keys' backward.
    """
    if TMA:
        found = tl.reshape(source.load([line, start]), (ROWS,))
    else:
        found = tl.load(source + tl.cast(line, tl.int64) * length + start + tl.arange(0, ROWS))
    return found


@triton.jit
def store_tile(
    target,
    value,
    batch,
    head,
    start,
    length,
    by_batch,
    by_head,
    by_row,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Write (ROWS, DP) to rows start to start + ROWS of one head, within ``length`` and D."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, DP)
    base = target + tl.cast(batch, tl.int64) * by_batch + tl.cast(head, tl.int64) * by_head
    base += tl.cast(start, tl.int64) * by_row
    at = base + (row.to(tl.int64)[:, None] * by_row + column[None, :])
    inside = (start + row < length)[:, None]
    if DP != D:
        inside = inside & (column < D)[None, :]
    tl.store(at, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def keys_of(lengths, batch, tk, PADDED: tl.constexpr):
    """How many keys this batch's queries see: its length, within [0, tk]."""
    found = tk
    if PADDED:
        found = tl.minimum(tl.maximum(tl.load(lengths + batch), 0), tk)
    return found


@triton.jit
def is_kept(low, high, threshold, line, query, key, tq, tk):
    """Which weights dropout keeps, by their places in a (B, H, Tq, Tk) tensor.

    ``line`` is the head's number of B H; ``query`` and ``key`` broadcast to the tile's shape.
    """
    at = (tl.cast(line, tl.int64) * tq + query.to(tl.int64)) * tk + key.to(tl.int64)
    a, b, c, d = philox(low, high, at // 4)
    k = at % 4
    word = tl.where(k < 2, tl.where(k == 0, a, b), tl.where(k == 2, c, d))
    return word >= tl.cast(threshold, tl.uint32, bitcast=True)
