"""``AllGather``: fill whole weights from the processes' shards, with one all-gather per bucket.

FSDP2's own all-gather costs host time for each parameter at each forward: it allocates memory and sets
up each tensor again. Where whole weights stay allocated their addresses do not change, and a bucket
takes three launches: shards rounded into a buffer, the all-gather, and the buffer copied to the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

# torch 2.13 has a new name, and warns about the old one.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
ALIGNMENT = 8  # elements: each shard begins at a multiple of 16 bytes
ShardAndWhole = tuple[torch.Tensor, torch.Tensor]


@dataclass(kw_only=True)
class _Bucket:
    buffer: torch.Tensor  # (world * length,): the processes' shards, one process after another
    own: torch.Tensor  # (length,): this process's part of it
    shards: list[torch.Tensor] = field(default_factory=list)  # this process's shards of weights
    own_slices: list[torch.Tensor] = field(default_factory=list)  # views of ``own``, for the shards
    buffer_slices: list[torch.Tensor] = field(default_factory=list)  # views of ``buffer``
    weight_rows: list[torch.Tensor] = field(default_factory=list)  # views of whole weights, for these


class AllGather:
    """Fills whole weights from shards.

    Args:
        buckets: (shard, whole weight) pairs; a bucket's are gathered together. A whole weight (R, ...)
            is split by rows as ``torch.chunk`` does: ceil(R / world) rows per process, the last ones
            fewer or none. All whole weights have one dtype, to which shards are rounded.
        rank, world: number of this process, and number of processes.
    """

    def __init__(self, buckets: list[list[ShardAndWhole]], rank: int, world: int) -> None:
        first_weight = buckets[0][0][1]
        longest = max(sum(_shard_elements(whole, world) for _, whole in bucket) for bucket in buckets)
        # Buckets run one after another on one stream, so they can share one buffer.
        # Zeros: the padding between shards is sent too and must be initialised.
        shared = torch.zeros(longest * world, dtype=first_weight.dtype, device=first_weight.device)
        self._buckets = [_bucket(bucket, shared, rank, world) for bucket in buckets]

    @torch.no_grad()
    def __call__(self) -> None:
        """Gather; later work on this stream sees the new weights. All processes call it."""
        for b in self._buckets:
            torch._foreach_copy_(b.own_slices, b.shards)
            ALL_GATHER(b.buffer, b.own)
            torch._foreach_copy_(b.weight_rows, b.buffer_slices)


def _shard_elements(whole: torch.Tensor, world: int) -> int:
    """Return the elements of one process's shard in the buffer, with padding for alignment."""
    elements = -(-len(whole) // world) * whole[0].numel()
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _bucket(pairs: list[ShardAndWhole], shared: torch.Tensor, rank: int, world: int) -> _Bucket:
    length = sum(_shard_elements(whole, world) for _, whole in pairs)
    buffer = shared[: length * world]
    by_process = buffer.view(world, length)
    bucket = _Bucket(buffer=buffer, own=by_process[rank])
    begin = 0
    for shard, whole in pairs:
        # With fewer rows than processes the last processes have no shard.
        if shard.numel():
            bucket.shards.append(shard.detach())
            bucket.own_slices.append(by_process[rank, begin : begin + shard.numel()].view(shard.shape))
        for process, rows in enumerate(whole.detach().chunk(world)):
            bucket.weight_rows.append(rows)
            bucket.buffer_slices.append(by_process[process, begin : begin + rows.numel()].view(rows.shape))
        begin += _shard_elements(whole, world)
    return bucket
