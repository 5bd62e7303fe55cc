"""Triton kernels of the losses: statistics of a row online (arXiv:1805.02867), then its gradient.

A row may begin at any element: of 50257 bf16 columns only every eighth row starts on 16 bytes. It is walked
as a head of a few elements up to the boundary, a body of 16-byte vectors, and a tail; head and tail are
loaded together. A program takes one row, ``LANES`` vectors of ``WIDTH`` elements per step. Each lane keeps a
running maximum and sum of its own, so that nothing crosses threads before the end of the row.

With BY_COLUMN there is no head: a lane sums the same columns wherever the row begins, so that the bits of a
row do not depend on its address.
"""

from __future__ import annotations

from weft.backends.triton_jit import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the least finite number: -inf - -inf would be NaN
NOT_SPECIALIZED = ["ignore_index"]  # one compiled kernel for all of its values


@triton.jit
def edges(start, columns, WIDTH: tl.constexpr, BY_COLUMN: tl.constexpr):
    """Return (head, vectors of the body, columns of head and tail, mask of these columns) of a row.

    The row begins ``start`` elements after a 16-byte boundary.
    """
    # WIDTH is a power of two, so the mask leaves the elements up to the next boundary.
    head = tl.minimum(((-start) & (WIDTH - 1)).to(tl.int32), columns)
    if BY_COLUMN:
        head = columns * 0
    vectors = (columns - head) // WIDTH
    # One masked load for head and tail: both have fewer than WIDTH elements.
    i = tl.arange(0, 2 * WIDTH)  # the first half for the head, the second for the tail
    column = tl.where(i < WIDTH, i, head + vectors * WIDTH + i - WIDTH)
    return head, vectors, column, tl.where(i < WIDTH, i < head, column < columns)


@triton.jit
def row_statistics(
    x_ptr,
    start,
    columns,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    SUMS: tl.constexpr,
    BY_COLUMN: tl.constexpr,
):
    """Return (log-sum-exp, sum) of the row at ``start``; the sum is 0 without SUMS.

    The maximum may drop a NaN, but the total then is NaN, and with it the result; so it is for +inf. A row
    with -inf alone has a total of 0 and returns NaN, as torch does.
    """
    head, vectors, edge_column, edge_mask = edges(start, columns, WIDTH, BY_COLUMN)
    body = x_ptr + start
    if not BY_COLUMN:
        body = x_ptr + tl.multiple_of(start + head, WIDTH)
    lane, element = tl.arange(0, LANES), tl.arange(0, WIDTH)
    # One running maximum for each lane of vectors, not for each element: the registers of WIDTH maxima are
    # saved.
    top = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    sums = tl.zeros((LANES,), tl.float32)
    for step in range(0, vectors, LANES):
        # Whole vectors are masked, never parts of one, so that Triton keeps 16-byte loads.
        inside = (step + lane < vectors)[:, None]
        offset = ((step + lane) * WIDTH)[:, None] + element[None, :]
        # -inf is never a new maximum, and adds exp2(-inf) = 0 to the total.
        x = tl.load(body + offset, mask=inside, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 1))
        # The total so far is relative to the old maximum.
        total *= tl.exp2((top - new_top) * LOG2E)
        total += tl.sum(tl.exp2((x - new_top[:, None]) * LOG2E), 1)
        if SUMS:
            # Masked elements are -inf, which a sum must not have.
            sums += tl.sum(tl.where(inside, x, 0.0), 1)
        top = new_top
    x = tl.load(x_ptr + start + edge_column, mask=edge_mask, other=float("-inf")).to(tl.float32)
    row_top = tl.maximum(tl.max(top, 0), tl.max(x, 0))
    row_total = tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0)
    row_total += tl.sum(tl.exp2((x - row_top) * LOG2E), 0)
    row_sum = tl.sum(sums, 0)
    if SUMS:
        row_sum += tl.sum(tl.where(edge_mask, x, 0.0), 0)
    return tl.where(row_total > 0, row_top + tl.log(row_total), float("nan")), row_sum


@triton.jit
def row_loss(lse, target_logit, row_sum, columns, smoothing, z_loss, SMOOTH: tl.constexpr):
    """Return a row's loss from its log-sum-exp, its target's logit and the sum of its logits."""
    loss = lse + z_loss * lse * lse
    if SMOOTH:
        return loss - (1.0 - smoothing) * target_logit - smoothing / columns * row_sum
    return loss - target_logit


@triton.jit
def write_gradient(
    x_ptr,
    dx_ptr,
    start,
    dx_start,
    columns,
    target,
    counts,
    lse,
    factor,
    uniform,
    at_target,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    SAME_START: tl.constexpr,
    BY_COLUMN: tl.constexpr,
):
    """Write factor exp(x - lse) - uniform, minus ``at_target`` at the target, for one row.

    An ignored row (``counts`` False) is not read: its logits load as -inf, whose term is 0. dx may be x.
    SAME_START: dx_start equals start, so that stores are aligned where loads are.
    """
    head, vectors, edge_column, edge_mask = edges(start, columns, WIDTH, BY_COLUMN)
    body = x_ptr + start
    if not BY_COLUMN:
        body = x_ptr + tl.multiple_of(start + head, WIDTH)
    out = dx_ptr + dx_start + head
    if SAME_START and not BY_COLUMN:
        out = dx_ptr + tl.multiple_of(start + head, WIDTH)
    lane, element = tl.arange(0, LANES), tl.arange(0, WIDTH)
    edge_x = tl.load(x_ptr + start + edge_column, mask=edge_mask & counts, other=float("-inf")).to(tl.float32)
    edge_dx = factor * tl.exp2((edge_x - lse) * LOG2E) - uniform
    edge_dx -= tl.where(edge_column == target, at_target, 0.0)
    tl.store(dx_ptr + dx_start + edge_column, edge_dx.to(dx_ptr.dtype.element_ty), mask=edge_mask)
    for step in range(0, vectors, LANES):
        inside = (step + lane < vectors)[:, None]
        offset = ((step + lane) * WIDTH)[:, None] + element[None, :]
        x = tl.load(body + offset, mask=inside & counts, other=float("-inf")).to(tl.float32)
        dx = factor * tl.exp2((x - lse) * LOG2E) - uniform
        dx -= tl.where(head + offset == target, at_target, 0.0)
        tl.store(out + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def cross_entropy_forward(
    x_ptr,
    targets_ptr,
    losses_ptr,
    lse_ptr,
    columns,
    stride,
    ignore_index,
    smoothing,
    z_loss,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    SMOOTH: tl.constexpr,
    BY_COLUMN: tl.constexpr,
):
    # x: (rows, columns), rows `stride` apart; targets, losses, lse: (rows,). One program per row.
    # Bytes: each logit is read once, those of an ignored row not at all. A target out of range reads column 0
    # and gives NaN.
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
    else:
        start = row * stride
        inside = (target >= 0) & (target < columns)
        target_logit = tl.load(x_ptr + start + tl.where(inside, target, 0)).to(tl.float32)
        lse, row_sum = row_statistics(x_ptr, start, columns, WIDTH, LANES, SMOOTH, BY_COLUMN)
        lse = tl.where(inside, lse, float("nan"))
        loss = row_loss(lse, target_logit, row_sum, columns, smoothing, z_loss, SMOOTH)
        tl.store(losses_ptr + row, loss)
        tl.store(lse_ptr + row, lse)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def mean_of_rows(losses_ptr, targets_ptr, mean_ptr, count_ptr, rows, ignore_index, BLOCK: tl.constexpr):
    # losses, targets: (rows,); mean, count: one float each. One program, which adds up in a fixed order.
    # Bytes: 12 for each row. Without a row that counts the mean is 0 / 0 = NaN, as torch's is.
    total = tl.zeros((BLOCK,), tl.float32)
    counted = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(losses_ptr + row, mask=row < rows, other=0.0)  # an ignored row has 0
        target = tl.load(targets_ptr + row, mask=row < rows, other=0)
        counted += ((row < rows) & (target != ignore_index)).to(tl.int32)
    count = tl.sum(counted).to(tl.float32)
    tl.store(mean_ptr, tl.sum(total) / count)
    tl.store(count_ptr, count)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def cross_entropy_backward(
    grad_ptr,
    x_ptr,
    targets_ptr,
    lse_ptr,
    dx_ptr,
    columns,
    grad_stride,
    stride,
    dx_stride,
    ignore_index,
    smoothing,
    z_loss,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    SAME_START: tl.constexpr,
    BY_COLUMN: tl.constexpr,
):
    # As the forward; grad: (rows,), grad_stride apart (0: one for all rows); dx: (rows, columns), rows
    # dx_stride apart, and may be x. Bytes: each logit is read once, each gradient written once. Programs run
    # from the last row to the first: after a forward the last rows are still in the L2.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    target = tl.load(targets_ptr + row)
    lse = tl.load(lse_ptr + row)
    g = tl.load(grad_ptr + row * grad_stride).to(tl.float32)
    counts = target != ignore_index
    # An ignored row gets zeros also where the incoming gradient is Inf or NaN.
    g = tl.where(counts, g, 0.0)
    write_gradient(
        x_ptr,
        dx_ptr,
        row * stride,
        row * dx_stride,
        columns,
        target.to(tl.int32),
        counts,
        lse,
        g * (1.0 + 2.0 * z_loss * lse),
        g * smoothing / columns,
        g * (1.0 - smoothing),
        WIDTH,
        LANES,
        SAME_START,
        BY_COLUMN,
    )


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def cross_entropy_fused(
    x_ptr,
    targets_ptr,
    losses_ptr,
    columns,
    stride,
    ignore_index,
    smoothing,
    z_loss,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    SMOOTH: tl.constexpr,
):
    # x: (rows, columns), rows `stride` apart, overwritten by the gradient of the sum of the losses; targets,
    # losses: (rows,). One program per row. Bytes: each logit is read twice (the second time from the L2, if
    # the rows in flight fit there), each gradient written once.
    row = tl.program_id(0).to(tl.int64)
    start = row * stride
    target = tl.load(targets_ptr + row)
    counts = target != ignore_index
    inside = (target >= 0) & (target < columns)
    target_logit = tl.load(x_ptr + start + tl.where(inside, target, 0)).to(tl.float32)
    lse, row_sum = row_statistics(x_ptr, start, columns, WIDTH, LANES, SMOOTH, False)
    lse = tl.where(inside, lse, float("nan"))
    loss = row_loss(lse, target_logit, row_sum, columns, smoothing, z_loss, SMOOTH)
    tl.store(losses_ptr + row, tl.where(counts, loss, 0.0))
    tl.debug_barrier()  # the edges of a row are read and written by different threads
    # An ignored row loads as -inf below: with a lse of NaN its gradient would be NaN, not 0.
    lse = tl.where(counts, lse, 0.0)
    g = tl.where(counts, 1.0, 0.0)
    write_gradient(
        x_ptr,
        x_ptr,
        start,
        start,
        columns,
        target.to(tl.int32),
        counts,
        lse,
        g * (1.0 + 2.0 * z_loss * lse),
        g * smoothing / columns,
        g * (1.0 - smoothing),
        WIDTH,
        LANES,
        True,
        False,
    )


@triton.jit
def scale_gradient(x_ptr, grad_ptr, out_ptr, n, BLOCK: tl.constexpr):
    # x, out: (n,); grad: one number. Bytes: n elements read, n written, each in its own dtype.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n).to(tl.float32)
    x *= tl.load(grad_ptr)
    tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=offsets < n)
