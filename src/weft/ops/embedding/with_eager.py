"""Embedding composed by hand from torch calls, in float32; ``compile`` fuses them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from weft.backends.inductor import compiled
from weft.core import Implementation


def gather(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows of ``table`` that ids name, by the library, but for rows of no columns: its backward
    of those takes their stride for a width and reads a gradient that has no memory, which breaks a
    GPU's context for all that comes after."""
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
        y = y + positions.float().sum(0)  # of nothing: zeros, that the gradient of nothing exists
    return y.to(weight.dtype).contiguous()


IMPLEMENTATION = Implementation(
    operator="embedding",
    name="eager",
    backend="eager",
    forward=forward,
    idea="the table in float32, gather, add",
)
# Compiled code adds a row's gradients with atomics, in the order of their arrival.
COMPILED = replace(compiled(IMPLEMENTATION), deterministic=False)
