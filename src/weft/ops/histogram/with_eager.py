"""Histogram composed of torch calls: the bin of each element, and a scattered addition of ones."""

from __future__ import annotations

import torch

from weft.core import FORWARD, Implementation
from weft.ops.histogram.spec import bins_of, pieces


def forward(
    x: torch.Tensor, *, bins: int, low: float | None = None, high: float | None = None
) -> torch.Tensor:
    # One counter more, for what is not counted: a mask would have a size that the host must wait for.
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=x.device)
    one = torch.ones(1, dtype=torch.int64, device=x.device)
    for piece in pieces(x):
        numbers = bins_of(piece, bins, low, high)
        # Out of place, for torch.vmap.
        counts = counts.scatter_add(0, numbers, one.expand_as(numbers))
    return counts[:bins].clone()


IMPLEMENTATION = Implementation(
    operator="histogram",
    backend="eager",
    forward=forward,
    directions=(FORWARD,),
    idea="bins of all elements, then scatter_add of ones",
)
