"""Sum composed of torch calls: rows of 256 are summed, then their sums, until one is left."""

from __future__ import annotations

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._common.layout import dense, flat
from weft.ops.sum.spec import spread

ROW = 256  # elements; so short that the error stays small in any order of summation


def forward(x: torch.Tensor) -> torch.Tensor:
    # sum(dtype=...) converts each element as it is read, so that no converted copy of x is allocated.
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    parts = flat(dense(x))
    while parts.numel() > ROW:
        whole = parts.numel() // ROW * ROW
        rows = parts[:whole].view(-1, ROW).sum(1, dtype=wide)
        parts = torch.cat((rows, parts[whole:].sum(dtype=wide).view(1)))
    return parts.sum(dtype=wide).to(x.dtype)


IMPLEMENTATION = Implementation(
    operator="sum",
    backend="eager",
    forward=forward,
    backward=spread,
    idea="rows of 256, then their sums, level by level",
)
COMPILED = compiled(IMPLEMENTATION)
