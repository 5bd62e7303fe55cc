"""Device functions that attention's Triton kernels share: tiles of a (B, H, T, D) tensor, masks, dropout."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from weft.backends.triton_jit import tl, triton
from weft.ops._common.philox_triton import philox

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Values of DROPOUT besides 0: one block of random words for each key, or for four keys.
BY_ONES, BY_FOURS = tl.constexpr(1), tl.constexpr(2)
# Of x^3 to x^9 in tanh(x) for |x| < 0.5.
COEFFICIENT_3, COEFFICIENT_5 = tl.constexpr(-0.3333314061164856), tl.constexpr(0.13325822353363037)
COEFFICIENT_7, COEFFICIENT_9 = tl.constexpr(-0.0530422069132328), tl.constexpr(0.01723547652363777)
# Columns of float32 tiles that are multiplied and added one after the other.
COLUMNS = tl.constexpr(64)


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
def row_products(a, b):
    """Return the products of the rows of two tiles, ``a @ b.T``: (M, DP) and (N, DP) to (M, N) float32.

    No tensor core multiplies float32: a thread adds the DP products of an element one after the other, and
    the longer the sum, the larger its error. A library splits it. Here sums of COLUMNS products are added,
    which are independent and also run at the same time (errors, simulated: docs/log.md, 2026-11-28).
    """
    M: tl.constexpr = a.shape[0]
    N: tl.constexpr = b.shape[0]
    DP: tl.constexpr = a.shape[1]
    if a.dtype == tl.float32 and DP > COLUMNS:
        PARTS: tl.constexpr = DP // COLUMNS
        parts_of_a = tl.permute(tl.reshape(a, (M, PARTS, COLUMNS)), (1, 0, 2))
        parts_of_b = tl.permute(tl.reshape(b, (N, PARTS, COLUMNS)), (1, 2, 0))
        products = tl.sum(tl.dot(parts_of_a, parts_of_b, input_precision="ieee"), 0)
    else:
        products = tl.dot(a, b.T, input_precision="ieee")
    return products


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
def query_position(keys, tq, BOTTOM_RIGHT: tl.constexpr):
    """Return the position of query 0 among the keys (mask.py)."""
    shift = 0
    if BOTTOM_RIGHT:
        shift = keys - tq
    return shift


@triton.jit
def key_bounds(
    start, keys, shift, window,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return four bounds of the tiles of keys that queries start to start + BM read: the first, the first
    that needs no mask for the window, the first behind them that needs a mask, and the end.

    All but the end are multiples of BN. Divisions are of numbers from 0 on: Triton's cut towards 0.
    """
    first = 0
    unmasked_start = 0
    unmasked_end = keys // BN * BN
    last = keys
    if CAUSAL:
        last = tl.maximum(tl.minimum(keys, start + BM + shift), 0)
        unmasked_end = tl.minimum(unmasked_end, tl.maximum(start + shift + 1, 0) // BN * BN)
    if WINDOW:
        first = tl.maximum(start + shift - window + 1, 0) // BN * BN
        unmasked_start = tl.cdiv(tl.maximum(start + BM + shift - window, 0), BN) * BN
        unmasked_end = tl.maximum(unmasked_start, unmasked_end)
    return first, unmasked_start, unmasked_end, last


@triton.jit
def sees(query, key, shift, window, WINDOW: tl.constexpr):
    """Return True where ``query`` sees ``key`` by the causal mask; they are broadcast."""
    seen = key <= query + shift
    if WINDOW:
        seen = seen & (key > query + shift - window)
    return seen


@triton.jit
def with_terms(
    s, bias_ptr, batch, head, query, key, query_start, key_start, tq, keys, shift, slope,
    bias_batch, bias_head, bias_row, bias_column, ALIBI: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Return scores ``s`` with ALiBi and bias; ``s`` and ``slope`` include log2(e).

    ``query`` and ``key`` are positions that broadcast to the tile's shape. Distances are exact in float32 up
    to 2^24 keys. The absolute value is a modifier of the multiply-add's operand, not an instruction. The
    tile starts at ``query_start`` and ``key_start``, and the host limits a bias's strides: offsets inside of
    a tile fit 32 bits, which are half the registers of 64.
    """
    if ALIBI:
        distance = (query + shift).to(tl.float32) - key.to(tl.float32)
        s -= slope * tl.abs(distance)
    if BIAS:
        base = bias_ptr + tl.cast(batch, tl.int64) * bias_batch + tl.cast(head, tl.int64) * bias_head
        base += tl.cast(query_start, tl.int64) * bias_row + tl.cast(key_start, tl.int64) * bias_column
        at = base + ((query - query_start) * bias_row + (key - key_start) * bias_column)
        bias = tl.load(at, mask=(query < tq) & (key < keys), other=0.0)
        s += bias.to(tl.float32) * LOG2E
    return s


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent in float32, to 3 units in the last place.

    Near 0 by an odd polynomial of least squares, since 1 - 2 / (e^2x + 1) cancels there.
    """
    z = x * x
    near = x + x * z * (((COEFFICIENT_9 * z + COEFFICIENT_7) * z + COEFFICIENT_5) * z + COEFFICIENT_3)
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2 * LOG2E)) + 1.0)
    return tl.where(z < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def dropout_mask(
    low, high, threshold, line, query, key_start, tq, tk,
    BK: tl.constexpr, KEYS_FIRST: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    """Return True for the weights that dropout keeps, numbered row-major in a (B, H, Tq, Tk) tensor.

    ``line`` is the head's number among B H; ``query`` are positions (n,), and the keys are the BK from
    ``key_start`` on. The result is (n, BK), or (BK, n) with KEYS_FIRST. The seed's two halves are ``low`` and
    ``high``. With FOURS, where ``tk`` and ``key_start`` are multiples of 4, a block of four random words
    serves four keys; otherwise each key takes one word of a block of its own.
    """
    limit = tl.cast(threshold, tl.uint32, bitcast=True)
    row = (tl.cast(line, tl.int64) * tq + query.to(tl.int64)) * tk
    if FOURS:
        block = tl.cast(key_start // 4, tl.int64) + tl.arange(0, BK // 4)
        at = row[None, :] // 4 + block[:, None] if KEYS_FIRST else row[:, None] // 4 + block[None, :]
        a, b, c, d = philox(low, high, at)
        # Bytes, not words, move to the threads that hold the weights. The last two axes number the words.
        even = tl.join((a >= limit).to(tl.int8), (c >= limit).to(tl.int8))
        odd = tl.join((b >= limit).to(tl.int8), (d >= limit).to(tl.int8))
        keep = tl.join(even, odd)
        if KEYS_FIRST:
            return tl.reshape(tl.permute(keep, (0, 2, 3, 1)), (BK, row.shape[0])) != 0
        return tl.reshape(keep, (row.shape[0], BK)) != 0
    key = key_start + tl.arange(0, BK).to(tl.int64)
    each = row[None, :] + key[:, None] if KEYS_FIRST else row[:, None] + key[None, :]
    a, b, c, d = philox(low, high, each // 4)
    k = each % 4
    word = tl.where(k < 2, tl.where(k == 0, a, b), tl.where(k == 2, c, d))
    return word >= limit
