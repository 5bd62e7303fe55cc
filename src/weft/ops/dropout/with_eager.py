"""Dropout composed by hand from torch calls, Philox in 64-bit integers.

There is no ``compile`` implementation: its check had not ended after ten minutes on a busy machine. The cause
was not examined. Each round uses the words of the last one several times, ten rounds deep.
"""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._common.philox_dropout import keep_mask, keep_scale


def forward(x: torch.Tensor, *, p: float, seed: int) -> torch.Tensor:
    return torch.where(keep_mask(x, p, seed), x.float() * keep_scale(p), 0.0).to(x.dtype).contiguous()


IMPLEMENTATION = Implementation(
    operator="dropout",
    backend="eager",
    forward=forward,
    idea="Philox by torch calls, one after another",
)
