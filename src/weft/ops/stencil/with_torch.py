"""Five-point stencil by the library: one padded copy of the grid, a product, and four ``torch.addcmul``.

A convolution with a kernel of 3 x 3 would multiply the corners by 0, so that a NaN or Inf would reach its
diagonal neighbours. The zeros outside the grid do the same here for a coefficient that is not finite.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.core import Implementation


def forward(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    height, width = x.shape[-2:]
    padded = F.pad(x.float(), (1, 1, 1, 1))
    centre, *others = weights.float().unbind()
    y = padded[..., 1:-1, 1:-1] * centre
    # (down, right) of the neighbour in the padded grid: north, south, west, east.
    for (i, j), weight in zip(((0, 1), (2, 1), (1, 0), (1, 2)), others, strict=True):
        y = torch.addcmul(y, padded[..., i : i + height, j : j + width], weight)
    return y.to(x.dtype, memory_format=torch.contiguous_format)


IMPLEMENTATION = Implementation(
    operator="stencil",
    backend="torch",
    forward=forward,
    idea="F.pad, and torch.addcmul of shifted views",
)
