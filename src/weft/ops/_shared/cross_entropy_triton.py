"""Cross entropy's rows in Triton: statistics online (arXiv:1805.02867), then the gradient.

A row begins at any element: of 50257 bf16 columns only every eighth row starts on 16 bytes. So it
is walked as a head of a few elements up to the boundary, a body of 16-byte accesses, and a tail;
head and tail are loaded together. A program takes one row, ``LANES`` accesses of ``WIDE`` elements
at a time, each with its own running maximum and sum: nothing crosses threads before the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from weft.backends.triton_jit import TritonSpecimen, tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-3.4028234663852886e38)
ANY = ["ignore_index"]  # one program for all of its values


@dataclass(frozen=True, kw_only=True)
class Config:
    """One program a row, of ``warps`` warps, whose threads have ``accesses`` of 16 bytes each under
    way at a time."""

    warps: int
    accesses: int

    def lanes(self, columns: int, itemsize: int) -> int:
        """16-byte accesses a step of the walk: a power of two, and no more than the row needs."""
        needed = triton.next_power_of_2(max(1, columns * itemsize // 16))
        return int(min(32 * self.warps * self.accesses, needed))


@cache
def configure(columns: int, itemsize: int) -> Config:
    """The configuration for rows of ``columns``, forward and backward."""
    accesses = columns * itemsize // 16
    return Config(warps=next((w for w in (1, 2, 4) if accesses <= 128 * w), 8), accesses=2)


@cache
def configure_fused(columns: int, itemsize: int) -> Config:
    """The configuration for rows that are read, read again and written: a long one has 32 warps, so
    that the few rows in flight (two a multiprocessor) are still in the L2."""
    accesses = columns * itemsize // 16
    return Config(warps=next((w for w in (1, 2, 4, 8, 16) if accesses <= 128 * w), 32), accesses=2)


def candidates(columns: int, itemsize: int) -> list[Config]:
    """The configurations worth timing for rows of ``columns``."""
    vectors = columns * itemsize // 16
    every = [Config(warps=w, accesses=a) for w in (1, 2, 4, 8, 16, 32) for a in (1, 2, 4)]
    return [c for c in every if 32 * c.warps * c.accesses <= 2 * vectors] or [configure(1, 1)]


@triton.jit
def edges(start, columns, WIDE: tl.constexpr):
    """A row that begins ``start`` elements after a boundary: (head, accesses of the body, columns
    of head and tail, which of those are there)."""
    head = tl.minimum(((-start) & (WIDE - 1)).to(tl.int32), columns)
    vectors = (columns - head) // WIDE
    at = tl.arange(0, 2 * WIDE)
    column = tl.where(at < WIDE, at, head + vectors * WIDE + at - WIDE)
    return head, vectors, column, tl.where(at < WIDE, at < head, column < columns)


@triton.jit
def statistics(x_ptr, start, columns, WIDE: tl.constexpr, LANES: tl.constexpr, SUMS: tl.constexpr):
    """(log-sum-exp, sum) of the row at ``start``; the sum is 0 without SUMS.

    The maximum starts at the least finite number: -inf - -inf would be NaN. A NaN or +inf is found
    in the total; a row of nothing but -inf has none, and answers NaN as torch's does.
    """
    head, vectors, column, there = edges(start, columns, WIDE)
    body = x_ptr + tl.multiple_of(start + head, WIDE)
    lane, within = tl.arange(0, LANES), tl.arange(0, WIDE)
    top = tl.full((LANES,), LEAST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    sums = tl.zeros((LANES,), tl.float32)
    for at in range(0, vectors, LANES):
        inside = (at + lane < vectors)[:, None]
        place = ((at + lane) * WIDE)[:, None] + within[None, :]
        x = tl.load(body + place, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 1))
        total *= tl.exp2((top - higher) * LOG2E)
        total += tl.sum(tl.exp2((x - higher[:, None]) * LOG2E), 1)
        if SUMS:
            sums += tl.sum(tl.where(inside, x, 0.0), 1)
        top = higher
    x = tl.load(x_ptr + start + column, mask=there, other=float("-inf")).to(tl.float32)
    highest = tl.maximum(tl.max(top, 0), tl.max(x, 0))
    whole = tl.sum(total * tl.exp2((top - highest) * LOG2E), 0)
    whole += tl.sum(tl.exp2((x - highest) * LOG2E), 0)
    added = tl.sum(sums, 0)
    if SUMS:
        added += tl.sum(tl.where(there, x, 0.0), 0)
    return tl.where(whole > 0, highest + tl.log(whole), float("nan")), added


@triton.jit
def loss_of(lse, picked, added, columns, smoothing, z_loss, SMOOTH: tl.constexpr):
    """One row's loss from its log-sum-exp, its target's logit and the sum of its logits."""
    loss = lse + z_loss * lse * lse
    if SMOOTH:
        return loss - (1.0 - smoothing) * picked - smoothing / columns * added
    return loss - picked


@triton.jit
def write_gradient(
    x_ptr,
    dx_ptr,
    start,
    dx_start,
    columns,
    target,
    keep,
    lse,
    factor,
    each,
    at_target,
    WIDE: tl.constexpr,
    LANES: tl.constexpr,
    SAME: tl.constexpr,
):
    """One row's factor exp(x - lse) - each, less ``at_target`` at its target; the row is not read
    where it is not to ``keep``. dx may be x. SAME: dx_start = start, so that what is aligned for
    loads is for stores."""
    head, vectors, column, there = edges(start, columns, WIDE)
    body = x_ptr + tl.multiple_of(start + head, WIDE)
    out = dx_ptr + dx_start + head
    if SAME:
        out = dx_ptr + tl.multiple_of(start + head, WIDE)
    lane, within = tl.arange(0, LANES), tl.arange(0, WIDE)
    ends = tl.load(x_ptr + start + column, mask=there & keep, other=float("-inf")).to(tl.float32)
    ends = factor * tl.exp2((ends - lse) * LOG2E) - each
    ends -= tl.where(column == target, at_target, 0.0)
    tl.store(dx_ptr + dx_start + column, ends.to(dx_ptr.dtype.element_ty), mask=there)
    for at in range(0, vectors, LANES):
        inside = (at + lane < vectors)[:, None]
        place = ((at + lane) * WIDE)[:, None] + within[None, :]
        x = tl.load(body + place, mask=inside & keep, other=float("-inf")).to(tl.float32)
        dx = factor * tl.exp2((x - lse) * LOG2E) - each
        dx -= tl.where(head + place == target, at_target, 0.0)
        tl.store(out + place, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=ANY)
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
    WIDE: tl.constexpr,
    LANES: tl.constexpr,
    SMOOTH: tl.constexpr,
):
    # x: (rows, columns), rows `stride` apart; targets, losses, lse: (rows,). One program a row.
    # Bytes: each logit read once, none of an ignored row. A target out of range reads column 0 and
    # answers NaN.
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
    else:
        start = row * stride
        inside = (target >= 0) & (target < columns)
        picked = tl.load(x_ptr + start + tl.where(inside, target, 0)).to(tl.float32)
        lse, added = statistics(x_ptr, start, columns, WIDE, LANES, SMOOTH)
        lse = tl.where(inside, lse, float("nan"))
        loss = loss_of(lse, picked, added, columns, smoothing, z_loss, SMOOTH)
        tl.store(losses_ptr + row, loss)
        tl.store(lse_ptr + row, lse)


@triton.jit(do_not_specialize=ANY)
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
    WIDE: tl.constexpr,
    LANES: tl.constexpr,
    SAME: tl.constexpr,
):
    # As the forward; grad: (rows,), grad_stride apart (0: one for all); dx: (rows, columns), rows
    # dx_stride apart, and may be x. Bytes: each logit read once, each gradient written once. The
    # last row comes first: after a forward it is what the L2 still holds.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    target = tl.load(targets_ptr + row)
    lse = tl.load(lse_ptr + row)
    g = tl.load(grad_ptr + row * grad_stride).to(tl.float32)
    keep = target != ignore_index
    g = tl.where(keep, g, 0.0)
    write_gradient(
        x_ptr,
        dx_ptr,
        row * stride,
        row * dx_stride,
        columns,
        target.to(tl.int32),
        keep,
        lse,
        g * (1.0 + 2.0 * z_loss * lse),
        g * smoothing / columns,
        g * (1.0 - smoothing),
        WIDE,
        LANES,
        SAME,
    )


@triton.jit(do_not_specialize=ANY)
def cross_entropy_fused(
    x_ptr,
    targets_ptr,
    losses_ptr,
    columns,
    stride,
    ignore_index,
    smoothing,
    z_loss,
    WIDE: tl.constexpr,
    LANES: tl.constexpr,
    SMOOTH: tl.constexpr,
):
    # x: (rows, columns), rows `stride` apart, overwritten by the gradient of the sum of the losses.
    # targets, losses: (rows,). One program a row. Bytes: each logit read twice (the second time
    # from the L2, where the rows in flight fit), each gradient written once.
    row = tl.program_id(0).to(tl.int64)
    start = row * stride
    target = tl.load(targets_ptr + row)
    keep = target != ignore_index
    inside = (target >= 0) & (target < columns)
    picked = tl.load(x_ptr + start + tl.where(inside, target, 0)).to(tl.float32)
    lse, added = statistics(x_ptr, start, columns, WIDE, LANES, SMOOTH)
    lse = tl.where(inside, lse, float("nan"))
    loss = loss_of(lse, picked, added, columns, smoothing, z_loss, SMOOTH)
    tl.store(losses_ptr + row, tl.where(keep, loss, 0.0))
    tl.debug_barrier()  # no thread writes what another still reads
    lse = tl.where(keep, lse, 0.0)
    g = tl.where(keep, 1.0, 0.0)
    write_gradient(
        x_ptr,
        x_ptr,
        start,
        start,
        columns,
        target.to(tl.int32),
        keep,
        lse,
        g * (1.0 + 2.0 * z_loss * lse),
        g * smoothing / columns,
        g * (1.0 - smoothing),
        WIDE,
        LANES,
        True,
    )


def specimens(kernel: object, kinds: Iterable[tuple[str, int]]) -> tuple[TritonSpecimen, ...]:
    """``kernel`` as it ships, for (Triton's name of a dtype, columns)."""
    found = []
    name = str(getattr(kernel, "__name__", kernel))
    for kind, columns in kinds:
        size = 4 if kind == "fp32" else 2
        config = (configure if kernel is cross_entropy_forward else configure_fused)(columns, size)
        even = ":16" if columns % 16 == 0 else ""
        signature: dict[str, object] = {}
        if kernel is cross_entropy_backward:
            signature["grad_ptr"] = "*fp32"
        signature |= {"x_ptr": f"*{kind}", "targets_ptr": "*i64"}
        if kernel is cross_entropy_backward:
            signature |= {"lse_ptr": "*fp32", "dx_ptr": f"*{kind}", "columns": f"i32{even}"}
            signature |= {"grad_stride": "i32", "stride": f"i32{even}", "dx_stride": f"i32{even}"}
        else:
            signature["losses_ptr"] = "*fp32"
            if kernel is cross_entropy_forward:
                signature["lse_ptr"] = "*fp32"
            signature |= {"columns": f"i32{even}", "stride": f"i32{even}"}
        signature |= {"ignore_index": "i32", "smoothing": "fp32", "z_loss": "fp32"}
        signature |= {"WIDE": 16 // size, "LANES": config.lanes(columns, size)}
        signature["SAME" if kernel is cross_entropy_backward else "SMOOTH"] = (
            kernel is cross_entropy_backward
        )
        label = f"{name}-{kind}-{columns}"
        found.append(
            TritonSpecimen(label=label, kernel=kernel, signature=signature, num_warps=config.warps)
        )
    return tuple(found)
