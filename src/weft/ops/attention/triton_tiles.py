"""Device functions that attention's Triton kernels share: tiles of a (B, H, T, D) tensor, masks, dropout."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from weft.backends.triton_jit import tl, triton
from weft.ops._common.philox_triton import philox

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    source, batch, head, start, length, batch_stride, head_stride, row_stride,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load rows start to start + ROWS of one head, (ROWS, DP); 0 past ``length`` and past column D.

    ``source`` is a tensor descriptor, which checks bounds itself, if TMA; otherwise a pointer.
    """
    if TMA:
        rows = tl.reshape(source.load([batch, head, start, 0]), (ROWS, DP))
    else:
        row = tl.arange(0, ROWS)
        column = tl.arange(0, DP)
        base = source + tl.cast(batch, tl.int64) * batch_stride + tl.cast(head, tl.int64) * head_stride
        base += tl.cast(start, tl.int64) * row_stride
        at = base + (row.to(tl.int64)[:, None] * row_stride + column[None, :])
        inside = (start + row < length)[:, None]
        if DP != D:
            inside = inside & (column < D)[None, :]
        rows = tl.load(at, mask=inside, other=0.0)
    return rows


@triton.jit
def load_row_terms(source, line, start, length, ROWS: tl.constexpr, TMA: tl.constexpr):
    """Load ROWS floats from ``start`` of one line of (lines, length); all of them exist.

    With a descriptor a thread holds no addresses for them, which are 60 registers of the keys' backward.
    """
    if TMA:
        terms = tl.reshape(source.load([line, start]), (ROWS,))
    else:
        terms = tl.load(source + tl.cast(line, tl.int64) * length + start + tl.arange(0, ROWS))
    return terms


@triton.jit
def store_tile(
    target, value, batch, head, start, length, batch_stride, head_stride, row_stride,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Write (ROWS, DP) to rows start to start + ROWS of one head, within ``length`` and D."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, DP)
    base = target + tl.cast(batch, tl.int64) * batch_stride + tl.cast(head, tl.int64) * head_stride
    base += tl.cast(start, tl.int64) * row_stride
    at = base + (row.to(tl.int64)[:, None] * row_stride + column[None, :])
    inside = (start + row < length)[:, None]
    if DP != D:
        inside = inside & (column < D)[None, :]
    tl.store(at, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def visible_keys(lengths, batch, tk, PADDED: tl.constexpr):
    """Return the number of keys that this batch's queries see: its length, clamped to [0, tk]."""
    count = tk
    if PADDED:
        count = tl.minimum(tl.maximum(tl.load(lengths + batch), 0), tk)
    return count


@triton.jit
def dropout_mask(low, high, threshold, line, query, key, tq, tk):
    """Return True for the weights that dropout keeps, numbered row-major in a (B, H, Tq, Tk) tensor.

    ``line`` is the head's number among B H; ``query`` and ``key`` broadcast to the tile's shape. The seed's
    two halves are ``low`` and ``high``.
    """
    at = (tl.cast(line, tl.int64) * tq + query.to(tl.int64)) * tk + key.to(tl.int64)
    a, b, c, d = philox(low, high, at // 4)
    k = at % 4
    word = tl.where(k < 2, tl.where(k == 0, a, b), tl.where(k == 2, c, d))
    return word >= tl.cast(threshold, tl.uint32, bitcast=True)
