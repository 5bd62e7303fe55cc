"""Dropout composed by hand from torch calls, Philox in 64-bit integers.

There is no ``compile`` of it: a check that held it had not ended after ten minutes on a busy
machine. Not looked into; each round's words are used several times by the next, ten rounds deep.
"""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared.philox_dropout import kept, scale


def forward(x: torch.Tensor, *, p: float, seed: int) -> torch.Tensor:
    return torch.where(kept(x, p, seed), x.float() * scale(p), 0.0).to(x.dtype).contiguous()


IMPLEMENTATION = Implementation(
    operator="dropout",
    name="eager",
    backend="eager",
    forward=forward,
    idea="Philox by torch calls, one after another",
)
