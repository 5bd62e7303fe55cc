"""Reductions composed of torch calls, in float32."""

from __future__ import annotations

import torch

from weft.backends.inductor import compiled
from weft.core import FORWARD, Implementation
from weft.ops.reduce.spec import backward, dims, extents, first_best


def forward(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    along = dims(first, last)
    wide = x.float()
    if op in ("amax", "amin"):
        y = wide.amax(along) if op == "amax" else wide.amin(along)
    elif op == "logsumexp":
        n = extents(x.shape, first, last)[1]
        if n == 0:
            return x.new_full(wide.sum(along).shape, -torch.inf) + wide.sum(along).to(x.dtype)
        largest = wide.amax(along, keepdim=True).detach()
        # From 0 where the largest is infinite: Inf - Inf would be NaN.
        largest = torch.where(largest.abs() == torch.inf, 0.0, largest)
        y = (wide - largest).exp().sum(along).log() + largest.flatten(first, last).squeeze(first)
    else:
        y = wide.sum(along)
        if op == "mean":
            y = y / extents(x.shape, first, last)[1] if y.numel() and x.numel() else y * torch.nan
    return y.to(x.dtype)


REDUCE = Implementation(
    operator="reduce",
    backend="eager",
    forward=forward,
    backward=backward,
    idea="torch calls in float32, one for each step",
)
REDUCE_COMPILED = compiled(REDUCE)

ARGREDUCE = Implementation(
    operator="argreduce",
    backend="eager",
    forward=first_best,
    directions=(FORWARD,),
    idea="the largest element, then the least index of those that equal it",
)
ARGREDUCE_COMPILED = compiled(ARGREDUCE)
