"""Cumulative sum composed of torch calls: the scan of Hillis and Steele, in float32.

Step k adds to each element the one 2^k before it, so that an output is off by log2(n) roundings at most,
where a running sum is off by n.
"""

from __future__ import annotations

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation


def forward(x: torch.Tensor, *, exclusive: bool = False, reverse: bool = False) -> torch.Tensor:
    y = x.float()
    if reverse:
        y = y.flip(-1)
    if exclusive:
        y = torch.cat((torch.zeros_like(y[..., :1]), y[..., :-1]), -1)
    step = 1
    while step < y.shape[-1]:
        y = torch.cat((y[..., :step], y[..., step:] + y[..., :-step]), -1)
        step *= 2
    if reverse:
        y = y.flip(-1)
    # A row of one element has been neither copied nor converted so far.
    return y.to(x.dtype, memory_format=torch.contiguous_format, copy=True)


def backward(grad: torch.Tensor, *, exclusive: bool = False, reverse: bool = False) -> tuple[torch.Tensor]:
    return (forward(grad, exclusive=exclusive, reverse=not reverse),)


IMPLEMENTATION = Implementation(
    operator="cumsum",
    backend="eager",
    forward=forward,
    backward=backward,
    idea="log2(n) shifted additions (Hillis and Steele)",
)
COMPILED = compiled(IMPLEMENTATION)
