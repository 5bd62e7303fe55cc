"""Sorts with faults: unstable, NaN lost or misplaced, a missed digit or element, wrong indices, tiles."""

from __future__ import annotations

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, honest, plant

Pair = tuple[torch.Tensor, torch.Tensor]
TILE = 64
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _right(x: torch.Tensor, *, descending: bool = False) -> Pair:
    return honest("sort")(x, descending=descending)  # type: ignore[no-any-return]


def _unstable(x: torch.Tensor, *, descending: bool) -> Pair:
    """Reverse the order of equal elements."""
    values, indices = _right(x.flip(-1), descending=descending)
    return values, x.shape[-1] - 1 - indices


def _descending_by_flip(x: torch.Tensor, *, descending: bool) -> Pair:
    """Reverse the ascending order, which is stable no more."""
    values, indices = _right(x)
    return (values.flip(-1), indices.flip(-1)) if descending else (values, indices)


def _always_ascending(x: torch.Tensor, *, descending: bool) -> Pair:
    return _right(x)


def _nan_first(x: torch.Tensor, *, descending: bool) -> Pair:
    """Count NaN as the smallest element."""
    indices = _right(x.masked_fill(x.isnan(), -torch.inf), descending=descending)[1]
    return x.gather(-1, indices), indices


def _nan_lost(x: torch.Tensor, *, descending: bool) -> Pair:
    """Return Inf for NaN, in NaN's place."""
    values, indices = _right(x, descending=descending)
    return values.nan_to_num(torch.inf, torch.inf, -torch.inf), indices


def _signed_zeros(x: torch.Tensor, *, descending: bool) -> Pair:
    """Order elements by their bits, so that -0 is below 0."""
    x = x.contiguous()  # else the indices have the strides of x, which is another fault
    bits = x.view(BITS[x.element_size()])
    sign = torch.iinfo(bits.dtype).max
    keys = torch.where(x.isnan(), sign, bits ^ ((bits >> (8 * x.element_size() - 1)) & sign))
    indices = torch.sort(keys, dim=-1, descending=descending, stable=True)[1]
    return x.gather(-1, indices), indices


def _indices_of_tile(x: torch.Tensor, *, descending: bool) -> Pair:
    """Number the elements within tiles, not within the row."""
    values, indices = _right(x, descending=descending)
    return values, indices % TILE


def _tiles(x: torch.Tensor, *, descending: bool = False) -> Pair:
    """Sort each tile, and put the tiles one after another."""
    parts = [_right(part, descending=descending) for part in x.split(TILE, -1)] or [_right(x)]
    indices = torch.cat([part[1] + i * TILE for i, part in enumerate(parts)], -1)
    return torch.cat([part[0] for part in parts], -1), indices


def _tiles_late(x: torch.Tensor, *, descending: bool) -> Pair:
    """Take the tiles in the wrong order: equal elements of the last tile come first."""
    n = x.shape[-1]
    start = max(0, n - 1) // TILE * TILE
    values, indices = _right(x.roll(-start, -1) if start else x, descending=descending)
    return values, (indices + start) % max(n, 1)


def _without_last(x: torch.Tensor, *, descending: bool = False) -> torch.Tensor:
    """Sort all but the last element of a row, which appears nowhere; its neighbour appears twice."""
    if x.shape[-1] < 2:
        return _right(x, descending=descending)[0]
    return _right(torch.cat((x[..., :-1], x[..., -2:-1]), -1), descending=descending)[0]


def _low_digits(x: torch.Tensor, *, descending: bool = False) -> torch.Tensor:
    """Leave out the pass of the lowest digit."""
    bits = x.contiguous().view(BITS[x.element_size()])
    without = (bits & -256).view(x.dtype)
    indices = _right(without.where(~x.isnan(), x), descending=descending)[1]
    return x.gather(-1, indices)


def _unsigned(x: torch.Tensor, *, descending: bool = False) -> torch.Tensor:
    """Take the bits of integers as unsigned: negative ones come last."""
    if x.is_floating_point():
        return _right(x, descending=descending)[0]
    least = torch.iinfo(x.dtype).min
    return _right(x ^ least, descending=descending)[0] ^ least


def _duplicates_lost(x: torch.Tensor, *, descending: bool = False) -> torch.Tensor:
    """Write elements to places by their rank alone: equal ones share a place, and the rest stay 0."""
    values = _right(x, descending=descending)[0]
    first = torch.ones_like(values, dtype=torch.bool)
    first[..., 1:] = values[..., 1:] != values[..., :-1]
    return values.masked_fill(~first, 0)


def _plant(row: str, what: str, title: str, forward: Forward, killed_by: str, keys: bool = False) -> Mutant:
    operator = "sort_keys" if keys else "sort"
    return plant(f"{row}/{operator}/eager/{what}", title, killed_by, lambda: forward)


WRONG = "error drift property special"
MUTANTS = (
    _plant("W02", "unstable", "reverses the order of equal elements", _unstable, WRONG),
    _plant("W02", "descending-by-flip", "reverses the ascending order", _descending_by_flip, WRONG),
    _plant("W02", "always-ascending", "ignores descending", _always_ascending, WRONG),
    _plant("W02", "tiles-in-wrong-order", "takes the last tile first", _tiles_late, WRONG),
    _plant("W02", "sorts-tiles", "sorts each tile alone", _tiles, WRONG),
    _plant("W04", "indices-of-tile", "numbers elements within tiles", _indices_of_tile, WRONG),
    _plant("W12", "nan-first", "counts NaN as the smallest", _nan_first, WRONG),
    _plant("W12", "nan-lost", "returns Inf for NaN", _nan_lost, WRONG),
    _plant("W12", "signed-zeros", "sorts -0 below 0", _signed_zeros, WRONG),
    _plant("W04", "last-dropped", "drops the last element of a row", _without_last, WRONG, keys=True),
    _plant("W02", "lowest-digit", "leaves out the lowest digit", _low_digits, WRONG, keys=True),
    _plant("W02", "unsigned", "sorts negative integers last", _unsigned, WRONG, keys=True),
    _plant("W02", "duplicates-lost", "keeps one of equal elements", _duplicates_lost, WRONG, keys=True),
)
