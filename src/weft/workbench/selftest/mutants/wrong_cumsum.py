"""Cumulative sum with faults: lost carries, an exclusive scan by subtraction, low precision, a wrong end."""

from __future__ import annotations

from typing import Any

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, after, honest, plant

TILE = 64


def _right(x: torch.Tensor, **params: Any) -> torch.Tensor:
    return honest("cumsum")(x, **params)  # type: ignore[no-any-return]


def _no_carry(x: torch.Tensor, **params: Any) -> torch.Tensor:
    """Scan each tile by itself."""
    tiles = x.split(TILE, -1) if x.shape[-1] else (x,)
    return torch.cat([_right(tile, **params) for tile in tiles], -1)


def _carry_of_last_tile(x: torch.Tensor, **params: Any) -> torch.Tensor:
    """Add the sum of the previous tile alone to each tile."""
    if params["reverse"] or x.shape[-1] <= TILE:
        return _right(x, **params)
    pieces, carry = [], torch.zeros_like(x[..., :1])
    for tile in x.split(TILE, -1):
        pieces.append(carry + _right(tile, **params))
        carry = tile.sum(-1, keepdim=True)
    return torch.cat(pieces, -1)


def _subtracts(x: torch.Tensor, *, exclusive: bool, reverse: bool) -> torch.Tensor:
    """Compute the exclusive scan as the inclusive one less the element: NaN at an Inf."""
    y = _right(x, exclusive=False, reverse=reverse)
    return y - x if exclusive else y


def _forward_only(x: torch.Tensor, *, exclusive: bool, reverse: bool) -> torch.Tensor:
    return _right(x, exclusive=exclusive, reverse=False)


def _always_inclusive(x: torch.Tensor, *, exclusive: bool, reverse: bool) -> torch.Tensor:
    return _right(x, exclusive=False, reverse=reverse)


def _in_dtype(x: torch.Tensor, **params: Any) -> torch.Tensor:
    """Keep the running sum in the input's own 16 bits."""
    if x.dtype == torch.float32 or x.numel() == 0:
        return _right(x, **params)
    wide = x.flip(-1) if params["reverse"] else x
    total, columns = torch.zeros_like(wide[..., 0]), []
    for column in wide.unbind(-1):
        columns.append(total + (0 if params["exclusive"] else column))
        total = total + column
    y = torch.stack(columns, -1)
    return y.flip(-1) if params["reverse"] else y


def _half_inside(x: torch.Tensor, **params: Any) -> torch.Tensor:
    return _right(x.bfloat16().float(), **params).to(x.dtype)


def _no_last(x: torch.Tensor, **params: Any) -> torch.Tensor:
    """Leave out the elements after the last whole vector of four."""
    y = _right(x, **params).clone(memory_format=torch.contiguous_format)
    whole = x.shape[-1] // 4 * 4
    y[..., whole:] = 0
    return y


def _same_direction(grad: torch.Tensor, **params: Any) -> tuple[torch.Tensor]:
    return (_right(grad, **params),)


def _plant(row: str, what: str, title: str, killed_by: str, forward: Forward, **more: Any) -> Mutant:
    return plant(f"{row}/cumsum/eager/{what}", title, killed_by, lambda: forward, **more)


MUTANTS = (
    _plant("W04", "no-carry", "tiles without the sum of the tiles before", "error drift property", _no_carry),
    _plant("W04", "one-carry", "the carry of the previous tile alone", "error drift property",
           _carry_of_last_tile),
    _plant("W04", "no-last", "leaves out the end of a row", "error drift property", _no_last),
    _plant("W02", "left-to-right", "ignores reverse", "error property", _forward_only),
    _plant("W02", "inclusive", "ignores exclusive", "error property", _always_inclusive),
    _plant("W08", "in-dtype", "a running sum in 16 bits", "error drift property", _in_dtype),
    _plant("W08", "bf16-inside", "sums bfloat16 elements", "error drift property", _half_inside),
    _plant("W12", "subtracts", "exclusive by a subtraction", "special property", _subtracts),
    # Without the special values a property may still see it: the NaN of a case begins some of its rows.
    plant("W12/cumsum/eager/no-nan", "0 for NaN", "special property", after("cumsum", torch.nan_to_num)),
    _plant("W22", "same-direction", "a gradient that is scanned forwards", "error property", _right,
           backward=lambda: _same_direction, only="backward"),
)  # fmt: skip
