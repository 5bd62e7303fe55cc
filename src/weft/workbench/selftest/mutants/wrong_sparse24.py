"""2:4 sparsity with faults: the third largest, ties, NaN, codes of the group beside, a lost end of K."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core import registry
from weft.ops.sparse24 import pattern
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, plant

Pair = tuple[Tensor, Tensor]
LAST_STEP = 16  # columns of x that a product leaves out


def _right(operator: str, *inputs: Tensor) -> Any:
    return registry.implementation(operator, "eager").forward(*inputs)


def _with_places(w: Tensor, places: Tensor) -> Pair:
    values = pattern.groups(w).gather(-1, places)
    return values.reshape(w.shape[0], w.shape[1] // pattern.NONZEROS), pattern.pack(places)


def _order(keys: Tensor) -> Tensor:
    return torch.sort(pattern.groups(keys), dim=-1, descending=True, stable=True).indices


def _third_largest(w: Tensor) -> Pair:
    """Keep the largest and the third largest of each four."""
    return _with_places(w, _order(pattern.magnitudes(w))[..., ::2].sort(-1).values)


def _last_of_ties(w: Tensor) -> Pair:
    """Keep the higher place of equal magnitudes."""
    from_the_end = _order(pattern.magnitudes(w).flip(-1)).flip(1)[..., :2]
    return _with_places(w, (3 - from_the_end).sort(-1).values)


def _nan_lost(w: Tensor) -> Pair:
    """Count NaN as the smallest."""
    keys = pattern.magnitudes(w).masked_fill(w.isnan(), -1)
    return _with_places(w, _order(keys)[..., :2].sort(-1).values)


def _by_value(w: Tensor) -> Pair:
    """Keep the two largest by value, not by magnitude."""
    return _with_places(w, _order(w.detach())[..., :2].sort(-1).values)


def _neighbours(metadata: Tensor) -> Tensor:
    """Return the codes of the group beside each: neighbouring nibbles change places."""
    words = metadata.long() & 0xFFFFFFFF
    return ((words & 0x0F0F0F0F) << 4 | words >> 4 & 0x0F0F0F0F).to(torch.int32)


def _neighbour_codes(w: Tensor) -> Pair:
    values, metadata = _right("prune_2_4", w)
    return values, _neighbours(metadata)


def _expand_neighbours(values: Tensor, metadata: Tensor) -> Tensor:
    return _right("expand_2_4", values, _neighbours(metadata))  # type: ignore[no-any-return]


def _expand_halves(values: Tensor, metadata: Tensor) -> Tensor:
    """Read the halves of a word the other way round: rows r and r + 8."""
    words = metadata.long() & 0xFFFFFFFF
    turned = (words << 16 | words >> 16).to(torch.int32)
    return _right("expand_2_4", values, turned)  # type: ignore[no-any-return]


def _drops_last_step(x: Tensor, values: Tensor, metadata: Tensor, bias: Tensor) -> Tensor:
    """Leave out the last columns of x."""
    shortened = x.clone()
    shortened[..., max(0, x.shape[-1] - LAST_STEP) :] = 0
    return _right("sparse_linear", shortened, values, metadata, bias)  # type: ignore[no-any-return]


def _linear_neighbours(x: Tensor, values: Tensor, metadata: Tensor, bias: Tensor) -> Tensor:
    return _right("sparse_linear", x, values, _neighbours(metadata), bias)  # type: ignore[no-any-return]


def _selector(x: Tensor, values: Tensor, metadata: Tensor, bias: Tensor) -> Tensor:
    """Take the codes of the first 32 of 64 columns for both."""
    split = metadata.view(*metadata.shape[:2], 8, 2, 2).clone()
    split[..., 1, :] = split[..., 0, :]
    return _right("sparse_linear", x, values, split.view(metadata.shape), bias)  # type: ignore[no-any-return]


def _no_bias(x: Tensor, values: Tensor, metadata: Tensor, bias: Tensor) -> Tensor:
    return _right("sparse_linear", x, values, metadata, torch.zeros_like(bias))  # type: ignore[no-any-return]


def _three_of_a_row(w: Tensor) -> tuple[Tensor, ...]:
    """Prune the transpose by itself: two masks."""
    return *_right("prune_2_4", w), *_right("prune_2_4", w.t().contiguous())


def _plant(row: str, operator: str, what: str, title: str, forward: Forward, killed: str = "") -> Mutant:
    killed = killed or "error drift property special"
    return plant(f"{row}/{operator}/eager/{what}", title, killed, lambda: forward)


MUTANTS = (
    _plant("W02", "prune_2_4", "third-largest", "keeps the third largest of four", _third_largest),
    _plant("W02", "prune_2_4", "last-of-ties", "keeps the last of equal magnitudes", _last_of_ties),
    _plant("W02", "prune_2_4", "by-value", "keeps the largest by value", _by_value),
    _plant("W12", "prune_2_4", "nan-lost", "counts NaN as the smallest", _nan_lost),
    _plant("W04", "prune_2_4", "neighbour", "codes of the group beside", _neighbour_codes),
    _plant("W04", "expand_2_4", "neighbour", "reads the codes of the group beside", _expand_neighbours),
    _plant("W04", "expand_2_4", "halves", "takes rows 8 apart for each other", _expand_halves),
    _plant("W02", "prune_2_4_transposable", "two-masks", "a mask for each orientation", _three_of_a_row),
    _plant("W04", "sparse_linear", "last-step", "leaves out the last 16 columns", _drops_last_step),
    _plant("W04", "sparse_linear", "neighbour", "reads the codes of the group beside", _linear_neighbours),
    _plant("W04", "sparse_linear", "selector", "one selector for both halves of 64 columns", _selector),
    _plant("W02", "sparse_linear", "no-bias", "adds no bias", _no_bias),
)
