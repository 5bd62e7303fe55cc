"""The sum composed by hand from torch calls: rows of 256, then their sums, until one is left."""

from __future__ import annotations

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._shared.layout import dense, flat
from weft.ops.sum.spec import spread

ROW = 256  # elements; short, so that whatever order a row is summed in, its error stays small


def forward(x: torch.Tensor) -> torch.Tensor:
    # A dtype given to sum() widens each element on its way in: no wide copy of x is made.
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    parts = flat(dense(x))
    while parts.numel() > ROW:
        whole = parts.numel() // ROW * ROW
        rows = parts[:whole].view(-1, ROW).sum(1, dtype=wide)
        parts = torch.cat((rows, parts[whole:].sum(dtype=wide).view(1)))
    return parts.sum(dtype=wide).to(x.dtype)


IMPLEMENTATION = Implementation(
    operator="sum",
    name="eager",
    backend="eager",
    forward=forward,
    backward=spread,
    idea="rows of 256, then their sums, level by level",
)
COMPILED = compiled(IMPLEMENTATION)
