"""Histogram by the library: ``torch.bincount`` of the bins. ``torch.histc`` has other bins at edges."""

from __future__ import annotations

import torch

from weft.core import FORWARD, Implementation
from weft.ops.histogram.spec import bins_of, pieces


def forward(
    x: torch.Tensor, *, bins: int, low: float | None = None, high: float | None = None
) -> torch.Tensor:
    counts = torch.zeros(bins, dtype=torch.int64, device=x.device)
    for piece in pieces(x):
        # Out of place, for torch.vmap.
        counts = counts + torch.bincount(bins_of(piece, bins, low, high), minlength=bins + 1)[:bins]
    return counts


IMPLEMENTATION = Implementation(
    operator="histogram",
    backend="torch",
    forward=forward,
    directions=(FORWARD,),
    idea="torch.bincount of the bins",
)
