"""Softmax composed by hand from torch calls, in float32; ``compile`` fuses them."""

from __future__ import annotations

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.ops._common.invariant_rows import supports_unsplit_sums


def forward(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:  # the maximum of nothing has no answer
        return x.clone(memory_format=torch.contiguous_format)  # empty_like would cut the gradient
    wide = x.float()
    e = torch.exp(wide - wide.amax(-1, keepdim=True).detach())
    return (e / e.sum(-1, keepdim=True)).to(x.dtype).contiguous()


def backward(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    g, y32 = grad.float(), y.float()
    dx = y32 * (g - (g * y32).sum(-1, keepdim=True))
    return (dx.to(y.dtype),)


# On a CPU. The backward of torch.softmax differs there for single rows: one in some thousand.
IMPLEMENTATION = with_invariant(
    Implementation(
        operator="softmax",
        backend="eager",
        forward=forward,
        backward=backward,
        idea="max, sub, exp, sum, div",
    ),
    devices=("cpu",),
    supports=supports_unsplit_sums,
)
COMPILED = compiled(IMPLEMENTATION)
