"""2:4 sparsity composed of torch calls: comparisons of each four, and a dense product."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.core import FORWARD, Implementation
from weft.ops.sparse24 import pattern
from weft.ops.sparse24.pattern import GROUP, NONZEROS


def two_largest(w: Tensor) -> Tensor:
    """Return which elements stay, (rows, columns / 4, 4): those with fewer than two before them."""
    key = pattern.groups(pattern.magnitudes(w))
    # Element j is before element i if it is larger, or as large and at a lower place.
    before = torch.ones(GROUP, GROUP, dtype=torch.bool, device=w.device).tril(-1)
    ahead = (key[..., None, :] > key[..., None]) | ((key[..., None, :] == key[..., None]) & before)
    return ahead.sum(-1) < NONZEROS


def prune(w: Tensor) -> tuple[Tensor, Tensor]:
    places = pattern.places_of(two_largest(w))
    values = pattern.groups(w).gather(-1, places)
    return values.reshape(w.shape[0], w.shape[1] // NONZEROS), pattern.pack(places)


def mask_of_tiles(w: Tensor) -> Tensor:
    """Return the mask of 4 x 4 tiles, (rows, columns): each round takes the largest element that may stay."""
    rows, columns = w.shape
    size = GROUP * GROUP
    key = pattern.magnitudes(w) * size
    tiles = key.view(rows // GROUP, GROUP, columns // GROUP, GROUP).transpose(1, 2).reshape(-1, size)
    tiles = tiles + torch.arange(size - 1, -1, -1, device=w.device)  # distinct, and ties by place
    mask = torch.zeros_like(tiles, dtype=torch.bool)
    places = torch.arange(size, device=w.device)
    for _ in range(GROUP * NONZEROS):
        in_tile = mask.view(-1, GROUP, GROUP)
        is_full = (in_tile.sum(2) >= NONZEROS)[:, :, None] | (in_tile.sum(1) >= NONZEROS)[:, None]
        open_keys = tiles.masked_fill(is_full.view(-1, size) | mask, -1)
        best, at = open_keys.max(-1, keepdim=True)
        # A tile may have no place left: every element that remains is in a full row or a full column.
        mask = mask | ((places == at) & (best >= 0))
    shape = (rows // GROUP, columns // GROUP, GROUP, GROUP)
    return mask.view(shape).transpose(1, 2).reshape(rows, columns)


def _masked(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    places = pattern.places_of(pattern.groups(mask))
    values = pattern.groups(w.masked_fill(~mask, 0)).gather(-1, places)
    return values.reshape(w.shape[0], w.shape[1] // NONZEROS), pattern.pack(places)


def prune_transposable(w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not w.numel():
        mask = torch.zeros(w.shape, dtype=torch.bool, device=w.device)
    else:
        mask = mask_of_tiles(w.contiguous())
    return *_masked(w, mask), *_masked(w.t(), mask.t())


def expand(values: Tensor, metadata: Tensor) -> Tensor:
    rows, half = values.shape
    columns = half * GROUP // NONZEROS
    places = pattern.unpack(metadata, rows, columns)[..., None, :]
    pairs = values.reshape(rows, columns // GROUP, 1, NONZEROS)
    is_here = places == torch.arange(GROUP, device=values.device)[:, None]
    return torch.where(is_here, pairs, 0).sum(-1, dtype=values.dtype).reshape(rows, columns)


def linear(x: Tensor, values: Tensor, metadata: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, pattern.expand(values, metadata), bias)


PRUNE_2_4 = Implementation(
    operator="prune_2_4", backend="eager", forward=prune, idea="comparisons of each four with each other"
)
PRUNE_2_4_TRANSPOSABLE = Implementation(
    operator="prune_2_4_transposable",
    backend="eager",
    forward=prune_transposable,
    directions=(FORWARD,),
    idea="eight rounds of the largest element of each tile that may stay",
)
EXPAND_2_4 = Implementation(
    operator="expand_2_4", backend="eager", forward=expand, idea="each place compares itself with the codes"
)
SPARSE_LINEAR = Implementation(
    operator="sparse_linear", backend="eager", forward=linear, idea="expand, then torch's linear layer"
)
