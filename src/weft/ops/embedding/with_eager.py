"""Embedding composed of torch calls, in float32; ``compile`` fuses them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.core.implementation import with_invariant


def gather(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``table`` that ids name.

    torch's backward of rows without columns takes their stride for their width and reads a gradient that has
    no memory, which breaks the CUDA context of the process: such tables do not reach it.
    """
    if table.shape[1]:
        return F.embedding(ids, table)
    return table.sum(0).expand(*ids.shape, 0)


def forward(weight: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    inside = (ids >= 0) & (ids < weight.shape[0])
    rows = gather(weight.float(), ids.clamp(0, max(weight.shape[0] - 1, 0)))
    y = torch.where(inside[..., None], rows, math.nan)
    if positions.shape[0]:
        y = y + positions[: ids.shape[1]].float()
    elif positions.requires_grad:
        y = y + positions.float().sum(0)  # an empty sum: zeros, so that positions get a gradient
    return y.to(weight.dtype).contiguous()


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="embedding",
        backend="eager",
        forward=forward,
        idea="the table in float32, gather, add",
    ),
    devices=("cpu",),
)
# Compiled code adds a row's gradients with atomics, in the order of their arrival.
COMPILED = replace(compiled(IMPLEMENTATION), deterministic=False)
