# mypy: disable-error-code="no-untyped-def,no-any-return"
# Parameters of a kernel have no Python type: the compiler infers their types at launch.
"""Triton kernels of embedding: the forward; sort keys, row offsets, sums and their merge for the backward.

Offsets into the tokens are int32: at most 2^31 - 1 tokens.
"""

from __future__ import annotations

from weft.backends.triton_jit import tl, triton


@triton.jit
def embedding_forward(
    weight_ptr,
    ids_ptr,
    positions_ptr,
    y_ptr,
    vocabulary,
    batch,
    length,
    columns,
    weight_stride,
    positions_stride,
    POSITIONS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # weight: (vocabulary, columns); ids: (batch, length); positions: (>= length, columns); rows
    # as far apart as their strides. y: (batch, length, columns) contiguous. A program computes PLACES
    # positions of SEQUENCES sequences and COLUMNS columns. Bytes: the rows that ids name, positions
    # once for SEQUENCES (then from L1), y. Outputs are streamed, so that the L2 keeps rows of frequent ids.
    slices = tl.cdiv(columns, COLUMNS)
    groups = tl.cdiv(batch, SEQUENCES)
    program = tl.program_id(0)
    column = (program % slices) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    line = tl.arange(0, SEQUENCES * PLACES)[:, None]
    b = (program // slices % groups) * SEQUENCES + line // PLACES
    t = (program // slices // groups) * PLACES + line % PLACES
    asked = (t < length) & (b < batch)
    there = asked & (column < columns)
    # int64 before it is multiplied by a row's length: tokens * columns exceeds 2^31 in large batches.
    token = (b * length + t).to(tl.int64)
    id = tl.load(ids_ptr + token, mask=asked, other=0)
    known = (id >= 0) & (id < vocabulary)
    # An id that names no row is masked out, so that it is never an address, and gives NaN.
    row = tl.load(weight_ptr + id * weight_stride + column, mask=there & known, other=float("nan"))
    y = row.to(tl.float32)
    if POSITIONS:
        at = t.to(tl.int64) * positions_stride + column
        y += tl.load(positions_ptr + at, mask=there, other=0).to(tl.float32)
    to = y_ptr + token * columns + column
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=there, cache_modifier=".cs")


@triton.jit
def embedding_keys(ids_ptr, key_ptr, tokens, vocabulary, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    # ids, key: (tokens,). An id that names no row becomes `vocabulary` and is sorted last.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids_ptr + at, mask=at < tokens, other=0)
    # BIAS shifts ids to the signed range of int16, which halves the passes of torch's radix sort.
    id = tl.where((id >= 0) & (id < vocabulary), id, vocabulary) - BIAS
    tl.store(key_ptr + at, id.to(key_ptr.dtype.element_ty), mask=at < tokens)


@triton.jit
def embedding_bounds(key_ptr, from_ptr, tokens, vocabulary, BIAS: tl.constexpr, STEPS, BLOCK: tl.constexpr):
    # key: (tokens,) sorted; from: (vocabulary + 1,), the offset of the first key that is not
    # below a row, by a binary search of STEPS steps.
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + tokens
    # tokens.bit_length() steps suffice; once low == high, `open` masks the loads and nothing changes.
    for _ in range(STEPS):
        middle = low + (high - low) // 2
        open = low < high
        key = tl.load(key_ptr + middle, mask=open, other=0).to(tl.int32) + BIAS
        below = open & (key < row)
        low = tl.where(below, middle + 1, low)
        high = tl.where(open & (key >= row), middle, high)
    tl.store(from_ptr + row, low, mask=row <= vocabulary)


@triton.jit
def _sum_positions(
    grad_ptr,
    to_ptr,
    one,
    places,
    batch,
    length,
    columns,
    stride,
    column,
    there,
    PLACES: tl.constexpr,
):
    # Sums PLACES positions, each over the sequences, in their order.
    t = one * PLACES + tl.arange(0, PLACES)[:, None]
    total = tl.zeros((PLACES, column.shape[1]), tl.float32)
    for b in range(0, batch, 8):
        # Eight unrolled steps: the compiler issues their loads together. The order of the additions stays
        # that of b.
        for u in tl.static_range(8):
            token = (t + (b + u) * length).to(tl.int64)
            mine = (t < length) & (b + u < batch) & there
            g = tl.load(grad_ptr + token * stride + column, mask=mine, other=0)
            total += g.to(tl.float32)
    to = to_ptr + t.to(tl.int64) * columns + column
    tl.store(to, total.to(to.dtype.element_ty), mask=(t < places) & there, cache_modifier=".cs")


@triton.jit
def _sum_piece(
    grad_ptr,
    order_ptr,
    from_ptr,
    to_ptr,
    row,
    in_bounds,
    begin,
    end,
    columns,
    stride,
    column,
    there,
    PIECE: tl.constexpr,
):
    # Sums the part of a row with more than PIECE tokens that is in order[begin:end], eight tokens at a time.
    first = tl.load(from_ptr + row, mask=in_bounds, other=0)
    last = tl.load(from_ptr + row + 1, mask=in_bounds, other=0)
    # A program of a piece sums its head row and its tail row; rows in between have at most PIECE tokens.
    if last - first > PIECE:
        # Eight rows in flight, added by a tree at the end: a fixed order, whatever the timing.
        lane = tl.arange(0, 8)[:, None]
        total = tl.zeros((8, column.shape[1]), tl.float32)
        last = tl.minimum(last, end)
        for at in range(tl.maximum(first, begin), last, 8):
            more = at + lane < last
            token = tl.load(order_ptr + at + lane, mask=more, other=0)
            g = tl.load(grad_ptr + token * stride + column, mask=more & there, other=0)
            total += g.to(tl.float32)
        tl.store(to_ptr + column, tl.sum(total, 0)[None, :], mask=there)


@triton.jit
def _sum_rows(
    grad_ptr,
    order_ptr,
    from_ptr,
    to_ptr,
    row,
    vocabulary,
    columns,
    stride,
    column,
    there,
    PIECE: tl.constexpr,
):
    # Sums rows with at most PIECE tokens, with loads of four tokens in flight for each; row: (ROWS, 1).
    first = tl.load(from_ptr + row, mask=row < vocabulary, other=0)
    last = tl.load(from_ptr + row + 1, mask=row < vocabulary, other=0)
    mine = (row < vocabulary) & (last - first <= PIECE)
    last = tl.where(mine, last, first)
    total = tl.zeros((row.shape[0], column.shape[1]), tl.float32)
    grad = grad_ptr + column
    # The longest of the ROWS rows sets the number of steps; shorter rows are masked.
    for k in range(0, tl.max(last - first), 4):
        at = first + k
        n0 = tl.load(order_ptr + at, mask=at < last, other=0)
        n1 = tl.load(order_ptr + at + 1, mask=at + 1 < last, other=0)
        n2 = tl.load(order_ptr + at + 2, mask=at + 2 < last, other=0)
        n3 = tl.load(order_ptr + at + 3, mask=at + 3 < last, other=0)
        g0 = tl.load(grad + n0 * stride, mask=(at < last) & there, other=0)
        g1 = tl.load(grad + n1 * stride, mask=(at + 1 < last) & there, other=0)
        g2 = tl.load(grad + n2 * stride, mask=(at + 2 < last) & there, other=0)
        g3 = tl.load(grad + n3 * stride, mask=(at + 3 < last) & there, other=0)
        total += g0.to(tl.float32) + g1.to(tl.float32)
        total += g2.to(tl.float32) + g3.to(tl.float32)
    to = to_ptr + row.to(tl.int64) * columns + column
    tl.store(to, total.to(to.dtype.element_ty), mask=mine & there, cache_modifier=".cs")


@triton.jit
def embedding_backward(
    grad_ptr,
    order_ptr,
    key_ptr,
    from_ptr,
    dweight_ptr,
    dpositions_ptr,
    partial_ptr,
    tokens,
    vocabulary,
    places,
    batch,
    length,
    columns,
    stride,
    place_programs,
    piece_programs,
    row_programs,
    BIAS: tl.constexpr,
    PIECE: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # grad: (tokens, columns), rows `stride` apart, token b * length + t; order: the tokens sorted by key;
    # from: the offset of each row's first token in order. dweight: (vocabulary, columns) and dpositions:
    # (places, columns), every row written once. partial: (2 * pieces, columns) float32. The grid goes slice
    # by slice of COLUMNS columns: programs for positions, for pieces of rows with more than PIECE tokens, and
    # for the other rows. Bytes: the gradient twice, the second time from the L2, and both outputs.
    each = place_programs + piece_programs + row_programs
    one = tl.program_id(0) % each
    column = (tl.program_id(0) // each) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = column < columns
    if one < place_programs:
        _sum_positions(
            grad_ptr,
            dpositions_ptr,
            one,
            places,
            batch,
            length,
            columns,
            stride,
            column,
            there,
            PLACES,
        )
    elif one < place_programs + piece_programs:
        piece = one - place_programs
        at = partial_ptr + 2 * piece.to(tl.int64) * columns
        begin = piece * PIECE
        end = tl.minimum(begin + PIECE, tokens)
        # A long row covers a piece's begin or end: it has more tokens than a piece, so that it cannot lie
        # inside.
        head = tl.load(key_ptr + begin).to(tl.int32) + BIAS
        tail = tl.load(key_ptr + end - 1).to(tl.int32) + BIAS
        _sum_piece(
            grad_ptr,
            order_ptr,
            from_ptr,
            at,
            head,
            head < vocabulary,
            begin,
            end,
            columns,
            stride,
            column,
            there,
            PIECE,
        )
        # One row may cover the whole piece; it is then summed once, as the head.
        other = (tail < vocabulary) & (tail != head)
        _sum_piece(
            grad_ptr,
            order_ptr,
            from_ptr,
            at + columns,
            tail,
            other,
            begin,
            end,
            columns,
            stride,
            column,
            there,
            PIECE,
        )
    else:
        row = (one - place_programs - piece_programs) * ROWS + tl.arange(0, ROWS)[:, None]
        _sum_rows(
            grad_ptr,
            order_ptr,
            from_ptr,
            dweight_ptr,
            row,
            vocabulary,
            columns,
            stride,
            column,
            there,
            PIECE,
        )


@triton.jit
def embedding_merge(
    key_ptr,
    from_ptr,
    partial_ptr,
    dweight_ptr,
    tokens,
    vocabulary,
    columns,
    BIAS: tl.constexpr,
    PIECE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # One program for each piece and slice. A long row that begins in this piece is the row of the piece's
    # last token. This program then adds the row's partial sums in the order of the pieces.
    piece = tl.program_id(0)
    start = piece * PIECE
    row = tl.load(key_ptr + tl.minimum(start + PIECE, tokens) - 1).to(tl.int32) + BIAS
    first = tl.load(from_ptr + row, mask=row < vocabulary, other=0)
    last = tl.load(from_ptr + row + 1, mask=row < vocabulary, other=0)
    if (last - first > PIECE) & (first >= start):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        there = column < columns
        lane = tl.arange(0, 32)[:, None]
        pieces = (last - 1) // PIECE + 1
        total = tl.zeros((32, COLUMNS), tl.float32)
        for at in range(piece, pieces, 32):
            # The row's tokens are the last ones of its first piece, and the first ones of others.
            partial_row = 2 * (at + lane) + ((at + lane == piece) & (first > start)).to(tl.int32)
            more = (at + lane < pieces) & there
            total += tl.load(partial_ptr + partial_row.to(tl.int64) * columns + column, mask=more, other=0)
        to = dweight_ptr + row.to(tl.int64) * columns + column
        tl.store(to, tl.sum(total, 0)[None, :].to(to.dtype.element_ty), mask=there)
