"""Whole weights from the parts that processes hold: one all-gather a bucket, into what stays there.

FSDP2's own gathering takes the host's time for each parameter, at each forward: it makes memory,
and puts each tensor in its place anew. Where whole weights stay, their places do, and a bucket is
three launches: the parts rounded into a buffer, the all-gather, and the buffer copied to the
weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

# Its name from torch 2.13 on, where the older one warns.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
ALIGNED = 8  # elements: each part begins where a 16-byte access may
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(kw_only=True)
class _Bucket:
    buffer: torch.Tensor  # (world * length,): each process' parts, one after another
    mine: torch.Tensor  # (length,): this one's in it
    parts: list[torch.Tensor]
    places: list[torch.Tensor]
    pieces: list[torch.Tensor]
    rows: list[torch.Tensor]


class Gathering:
    """Fills whole weights from parts.

    Args:
        buckets: (part, whole) of each weight, those of a bucket gathered together. A whole (R, ...)
            is cut by rows as ``torch.chunk`` does: ceil(R / world) for each process, the last ones
            less or none. Whole ones are all of one dtype, to which parts are rounded.
        rank, world: this process' number, and how many there are.
    """

    def __init__(self, buckets: list[list[Pair]], rank: int, world: int) -> None:
        first = buckets[0][0][1]
        size = max(sum(_room(whole, world) for _, whole in bucket) for bucket in buckets)
        # One after another on one stream, so that all can use one memory.
        shared = torch.zeros(size * world, dtype=first.dtype, device=first.device)
        self._buckets = [_bucket(bucket, shared, rank, world) for bucket in buckets]

    @torch.no_grad()
    def __call__(self) -> None:
        """Gather: what follows on this stream sees the new weights. All processes call it."""
        for b in self._buckets:
            torch._foreach_copy_(b.places, b.parts)
            ALL_GATHER(b.buffer, b.mine)
            torch._foreach_copy_(b.rows, b.pieces)


def _room(whole: torch.Tensor, world: int) -> int:
    """Elements of a buffer that one process' part takes."""
    elements = -(-len(whole) // world) * whole[0].numel()
    return -(-elements // ALIGNED) * ALIGNED


def _bucket(pairs: list[Pair], shared: torch.Tensor, rank: int, world: int) -> _Bucket:
    length = sum(_room(whole, world) for _, whole in pairs)
    buffer = shared[: length * world]
    each = buffer.view(world, length)
    found = _Bucket(buffer=buffer, mine=each[rank], parts=[], places=[], pieces=[], rows=[])
    begin = 0
    for part, whole in pairs:
        if part.numel():
            found.parts.append(part.detach())
            found.places.append(each[rank, begin : begin + part.numel()].view(part.shape))
        for number, rows in enumerate(whole.detach().chunk(world)):
            found.rows.append(rows)
            found.pieces.append(each[number, begin : begin + rows.numel()].view(rows.shape))
        begin += _room(whole, world)
    return found
