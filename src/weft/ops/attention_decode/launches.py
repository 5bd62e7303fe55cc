"""Repeated launches of decoding: the same two kernels with the addresses of other tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from weft.ops._common.prepared import LaunchCache, are_repeatable

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, lengths, block_table
Launch = Callable[..., None]


class DecodeLaunches:
    """Launches of a backend by kind of call: those of the splits and of their merge."""

    def __init__(self) -> None:
        self._cache = LaunchCache()

    @staticmethod
    def key(inputs: Inputs, scale: float | None, paged: bool) -> Hashable:
        """Return what the launches depend on besides addresses, for inputs that are repeatable."""
        q, k, _, _, block_table = inputs
        return q.shape, k.shape, block_table.shape, q.dtype, q.get_device(), scale, paged

    def repeat(self, key: Hashable, inputs: Inputs) -> Tensor | None:
        """Return the output of a call of a known kind; None for others, and for tensors that are views."""
        launches = self._cache.get(key)
        if launches is None or not are_repeatable(*inputs):
            return None
        split, merge, size = launches
        q, lengths = inputs[0], inputs[3]
        out = torch.empty_like(q)
        partials = torch.empty(size, dtype=torch.float32, device=q.device)
        split(*(x.data_ptr() for x in (*inputs, out, partials)))
        if merge:
            merge(partials.data_ptr(), lengths.data_ptr(), out.data_ptr())
        return out

    def store(
        self, key: Hashable, split: Launch | None, merge: Launch | None, size: int, splits: int
    ) -> None:
        """Keep the launches of a call, if its backend prepared all of them."""
        if key is not None and split is not None and (merge is not None or splits == 1):
            self._cache.store(key, (split, merge or False, size))
