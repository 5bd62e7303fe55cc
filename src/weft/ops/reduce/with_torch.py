"""Reductions by the library."""

from __future__ import annotations

import torch

from weft.core import FORWARD, Implementation
from weft.ops.reduce.spec import backward, dims


def forward(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    along = dims(first, last)
    if op == "logsumexp":
        # In float32: the library exponentiates and adds in the input's own 16 bits.
        return torch.logsumexp(x.float(), along).to(x.dtype)
    y: torch.Tensor = getattr(torch, op)(x, along)
    return y


REDUCE = Implementation(
    operator="reduce",
    backend="torch",
    forward=forward,
    backward=backward,
    idea="torch.sum, mean, amax, amin; torch.logsumexp in float32",
)


def forward_index(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    # torch documents that argmax and argmin return the first of equal elements.
    y: torch.Tensor = getattr(torch, op)(x.flatten(first, last), first)
    return y


ARGREDUCE = Implementation(
    operator="argreduce",
    backend="torch",
    forward=forward_index,
    directions=(FORWARD,),
    idea="torch.argmax, torch.argmin",
)
