"""Cumulative sum by the library: ``torch.cumsum``, with flips and a shift where they are asked for."""

from __future__ import annotations

import torch

from weft.core import Implementation


def forward(x: torch.Tensor, *, exclusive: bool = False, reverse: bool = False) -> torch.Tensor:
    y = x.flip(-1) if reverse else x.contiguous()
    if exclusive:
        # The input is shifted, not the output corrected by a subtraction: Inf - Inf would be NaN.
        y = torch.cat((torch.zeros_like(y[..., :1]), y[..., :-1]), -1)
    # Sums of half types in float32: torch's own in bfloat16 stop growing, or are off by a tenth in long rows.
    # The cast is a call of its own: the gradient of cumsum(dtype=...) is summed in the dtype of its input.
    y = torch.cumsum(y.float(), -1).to(x.dtype)
    return y.flip(-1) if reverse else y


IMPLEMENTATION = Implementation(
    operator="cumsum",
    backend="torch",
    forward=forward,
    deterministic=False,  # on a GPU, one row of millions of elements: other bits in each run
    idea="torch.cumsum, in float32",
)
