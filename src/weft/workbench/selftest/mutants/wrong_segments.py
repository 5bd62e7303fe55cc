"""Sums and scans of segments with faults: leaks over borders, lost elements, wrong ends, low precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.ops._common.offsets import piece_numbers
from weft.ops.segments.with_eager import forward_scan
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, honest, plant

VEC, TILE = 4, 64


def _right(values: Tensor, offsets: Tensor) -> Tensor:
    return honest("segmented_sum")(values, offsets)  # type: ignore[no-any-return]


def _right_scan(x: Tensor, offsets: Tensor, **flags: bool) -> Tensor:
    return forward_scan(x, offsets, **flags)


def _differences(values: Tensor, offsets: Tensor) -> Tensor:
    """Subtract sums of the whole row: a NaN or an Inf leaks into all segments behind it."""
    scan = torch.nn.functional.pad(values.float().cumsum(-1), (1, 0))
    return (scan[..., offsets[1:]] - scan[..., offsets[:-1]]).to(values.dtype)


def _one_too_many(values: Tensor, offsets: Tensor) -> Tensor:
    """Add the next segment's first element."""
    y, n = _right(values, offsets), values.shape[-1]
    ends = offsets[1:]
    if n == 0 or y.shape[-1] == 0:
        return y
    extra = values[..., ends.clamp(max=n - 1)].masked_fill((ends >= n) | (ends == offsets[:-1]), 0.0)
    return (y.float() + extra.float()).to(y.dtype)


def _no_last(values: Tensor, offsets: Tensor) -> Tensor:
    """Leave out the elements after the last whole vector of a longer segment."""
    n = values.shape[-1]
    lengths = offsets.diff()
    if n == 0:
        return _right(values, offsets)
    numbers = piece_numbers(offsets, n)
    place_in = torch.arange(n, device=values.device) - offsets[numbers]
    whole = torch.where(lengths > VEC, lengths // VEC * VEC, lengths)
    return _right(values.masked_fill(place_in >= whole[numbers], 0.0), offsets)


def _in_dtype(values: Tensor, offsets: Tensor) -> Tensor:
    """Keep each running sum in the input's own 16 bits."""
    if values.dtype == torch.float32:
        return _right(values, offsets)
    y = values.new_zeros((*values.shape[:-1], offsets.shape[0] - 1))
    lengths = offsets.diff()
    for k in range(int(lengths.max()) if lengths.numel() else 0):
        at = (offsets[:-1] + k).clamp(max=values.shape[-1] - 1)
        y = torch.where(k < lengths, y + values[..., at], y)
    return y


def _empty_takes_the_next(values: Tensor, offsets: Tensor) -> Tensor:
    """Give an empty segment the element at its offset."""
    y, n = _right(values, offsets).clone(), values.shape[-1]
    begins = offsets[:-1]
    empty = (begins == offsets[1:]) & (begins < n)
    return torch.where(empty, values[..., begins.clamp(max=max(n - 1, 0))], y) if n and y.numel() else y


def _mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Divide by the lengths."""
    return (_right(values, offsets).float() / offsets.diff().clamp(min=1)).to(values.dtype)


def _first_gradient(grad: Tensor, offsets: Tensor, columns: int) -> tuple[Tensor]:
    """Give every element the gradient of the segment after its own."""
    if columns == 0:
        return (grad.new_empty((*grad.shape[:-1], 0)),)
    numbers = (piece_numbers(offsets, columns) + 1).clamp(max=grad.shape[-1] - 1)
    return (grad[..., numbers],)


def _no_heads(x: Tensor, offsets: Tensor, **flags: bool) -> Tensor:
    """Scan the row as a whole."""
    whole = torch.tensor([0, x.shape[-1]], device=x.device)
    return _right_scan(x, whole, **flags)


def _subtracts(x: Tensor, offsets: Tensor, **flags: bool) -> Tensor:
    """Subtract the sum before each segment from the scan of the row."""
    if flags["reverse"] or flags["exclusive"] or not x.numel():
        return _right_scan(x, offsets, **flags)
    scan = torch.nn.functional.pad(x.float().cumsum(-1), (1, 0))
    begins = offsets[piece_numbers(offsets, x.shape[-1])]
    return (scan[..., 1:] - scan[..., begins]).to(x.dtype)


def _no_carry(x: Tensor, offsets: Tensor, **flags: bool) -> Tensor:
    """Begin anew at each tile of 64 elements too."""
    tiles = torch.arange(0, x.shape[-1], TILE, device=x.device)
    return _right_scan(x, torch.cat((offsets, tiles)).sort().values, **flags)


def _forward_heads(x: Tensor, offsets: Tensor, **flags: bool) -> Tensor:
    """Begin a reversed scan anew behind each segment's first element, not before its last."""
    if not flags["reverse"]:
        return _right_scan(x, offsets, **flags)
    return _right_scan(x, (offsets + 1).clamp(max=x.shape[-1]) * (offsets > 0), **flags)


def _inclusive(x: Tensor, offsets: Tensor, **flags: bool) -> Tensor:
    return _right_scan(x, offsets, exclusive=False, reverse=flags["reverse"])


def _same_direction(grad: Tensor, offsets: Tensor, **flags: bool) -> tuple[Tensor]:
    return (_right_scan(grad, offsets, **flags),)


def _plant(row: str, what: str, title: str, forward: Forward, **more: Any) -> Mutant:
    killed_by = "error drift property special"
    return plant(f"{row}/segmented_sum/eager/{what}", title, killed_by, lambda: forward, **more)


def _plant_scan(row: str, what: str, title: str, forward: Forward, **more: Any) -> Mutant:
    killed_by = "error drift property special"
    return plant(f"{row}/segmented_cumsum/eager/{what}", title, killed_by, lambda: forward, **more)


MUTANTS = (
    _plant("W12", "differences", "differences of a scan, so that a NaN leaks", _differences),
    _plant("W04", "one-too-many", "adds the next segment's first element", _one_too_many),
    _plant("W04", "no-last", "leaves out the end of a segment", _no_last),
    _plant("W08", "in-dtype", "a running sum in 16 bits", _in_dtype),
    _plant("W02", "empty-takes-next", "an empty segment has the next element", _empty_takes_the_next),
    _plant("W02", "mean", "divides by the length", _mean),
    _plant("W22", "next-gradient", "the gradient of the next segment", _right,
           backward=lambda: _first_gradient, only="backward"),
    _plant_scan("W04", "no-heads", "never begins anew", _no_heads),
    _plant_scan("W12", "subtracts", "subtracts what is before a segment", _subtracts),
    _plant_scan("W04", "no-carry", "begins anew at each tile", _no_carry),
    _plant_scan("W02", "forward-heads", "a reversed scan with the heads of the other", _forward_heads),
    _plant_scan("W02", "inclusive", "ignores exclusive", _inclusive),
    _plant_scan("W22", "same-direction", "a gradient that is scanned forwards", _right_scan,
                backward=lambda: _same_direction, only="backward"),
)  # fmt: skip
