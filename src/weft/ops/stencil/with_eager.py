"""Five-point stencil composed of torch calls: four padded products of parts of the grid, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.core import Implementation
from weft.ops.stencil.spec import SIDES

# Zeros before and behind the columns, and before and behind the rows, that give a part the grid's size.
PADS = ((0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0))


def forward(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    wide, coefficients = x.float(), weights.float()
    y = wide * coefficients[0]
    if x.numel():
        for (_, sides), pad, coefficient in zip(SIDES[1:], PADS, coefficients[1:], strict=True):
            # The product is padded, not the grid: a coefficient of Inf times a 0 outside would be NaN.
            y = y + F.pad(wide[..., *sides] * coefficient, pad)
    return y.to(x.dtype, memory_format=torch.contiguous_format)


IMPLEMENTATION = Implementation(
    operator="stencil",
    backend="eager",
    forward=forward,
    idea="a product, and four products of parts of the grid, padded and added",
)
