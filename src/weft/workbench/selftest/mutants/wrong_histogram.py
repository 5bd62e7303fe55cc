"""Histogram with faults: limits, NaN, rounding, another definition of a bin, lost and narrow counters."""

from __future__ import annotations

from typing import Any

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, honest, plant

TILE = 64


def _right(x: torch.Tensor, **params: Any) -> torch.Tensor:
    return honest("histogram")(x, **params)  # type: ignore[no-any-return]


def _without_high(x: torch.Tensor, **params: Any) -> torch.Tensor:
    """Leave out the elements equal to ``high``."""
    return _right(x[x != params["high"]] if params["high"] is not None else x, **params)


def _clamped(x: torch.Tensor, **params: Any) -> torch.Tensor:
    """Count elements outside of the range in the first and the last bin."""
    if params["high"] is None:
        return _right(x.clamp(max=min(params["bins"] - 1, torch.iinfo(x.dtype).max)), **params)
    return _right(x.clamp(params["low"], params["high"]), **params)


def _nan_is_zero(x: torch.Tensor, **params: Any) -> torch.Tensor:
    return _right(x.nan_to_num(0.0, torch.inf, -torch.inf) if x.is_floating_point() else x, **params)


def _by_quotient(x: torch.Tensor, *, bins: int, low: float | None, high: float | None) -> torch.Tensor:
    """Divide by the width of a bin where the definition multiplies by a rounded scale."""
    if low is None or high is None:
        return _right(x, bins=bins, low=low, high=high)
    wide = x.float()[(x >= low) & (x <= high)]
    number = ((wide - low) / ((high - low) / bins)).long().clamp(max=bins - 1)
    return torch.bincount(number, minlength=bins)


def _by_histc(x: torch.Tensor, *, bins: int, low: float | None, high: float | None) -> torch.Tensor:
    """Return torch.histc's counts: float32 sums, and other bins at edges."""
    if low is None or high is None or not x.numel() or x.device.type != "cpu":
        return _right(x, bins=bins, low=low, high=high)
    return torch.histc(x.float(), bins, low, high).long()


def _rounded(x: torch.Tensor, *, bins: int, low: float | None, high: float | None) -> torch.Tensor:
    """Take the nearest edge's bin."""
    if low is None or high is None:
        return _right(x, bins=bins, low=low, high=high)
    wide = x.double()[(x >= low) & (x <= high)]
    number = ((wide - low) * bins / (high - low)).round().long().clamp(max=bins - 1)
    return torch.bincount(number, minlength=bins)


def _whole_tiles(x: torch.Tensor, **params: Any) -> torch.Tensor:
    """Leave out the elements after the last whole tile."""
    flat = x.reshape(-1)
    return _right(flat[: flat.numel() // TILE * TILE] if flat.numel() > TILE else flat, **params)


def _narrow(x: torch.Tensor, **params: Any) -> torch.Tensor:
    """Count in 8 bits, which wrap."""
    return _right(x, **params) & 255


def _once_a_vector(x: torch.Tensor, **params: Any) -> torch.Tensor:
    """Count equal neighbours in a vector of four once, as an addition that loses what others add does."""
    flat = x.reshape(-1)
    whole = flat[: flat.numel() // 4 * 4].view(-1, 4)
    equal = (whole == whole[:, :1]).all(1)
    return (
        _right(whole[~equal], **params)
        + _right(whole[equal][:, 0], **params)
        + _right(flat[whole.numel() :], **params)
    )


def _int32(x: torch.Tensor, **params: Any) -> torch.Tensor:
    return _right(x, **params).int()


def _plant(row: str, what: str, title: str, killed_by: str, forward: Forward, **more: Any) -> Mutant:
    return plant(f"{row}/histogram/eager/{what}", title, killed_by, lambda: forward, **more)


MUTANTS = (
    _plant("W02", "no-high", "leaves out the upper limit", "error property", _without_high),
    _plant("W02", "clamped", "counts what is outside in the outer bins", "error property", _clamped),
    _plant("W02", "rounded", "the nearest edge's bin", "error", _rounded),
    _plant("W04", "whole-tiles", "leaves out elements after the last whole tile", "error property",
           _whole_tiles),
    _plant("W04", "lost-additions", "equal neighbours counted once", "error property", _once_a_vector),
    _plant("W08", "narrow", "counters of 8 bits", "error property", _narrow),
    _plant("W08", "quotient", "a division where the definition multiplies", "error", _by_quotient),
    _plant("W08", "histc", "torch.histc's bins", "error property", _by_histc),
    _plant("W12", "nan-is-zero", "counts NaN as 0", "error property", _nan_is_zero),
    _plant("W19", "int32", "counts of 32 bits", "dtype", _int32, only="dtype"),
)  # fmt: skip
