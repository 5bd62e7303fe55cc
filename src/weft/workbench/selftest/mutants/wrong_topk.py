"""The k largest elements with faults: ties, NaN, the wrong end, the end of a row, wrong indices."""

from __future__ import annotations

from typing import Any

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, honest, plant

Answer = tuple[torch.Tensor, torch.Tensor]


def _right(x: torch.Tensor, **params: Any) -> Answer:
    return honest("topk")(x, **params)  # type: ignore[no-any-return]


def _last_of_ties(x: torch.Tensor, **params: Any) -> Answer:
    """Take the higher index first among equal elements."""
    values, indices = _right(x.flip(-1), **params)
    return values, x.shape[-1] - 1 - indices


def _always_largest(x: torch.Tensor, *, k: int, largest: bool) -> Answer:
    return _right(x, k=k, largest=True)


def _unsorted(x: torch.Tensor, **params: Any) -> Answer:
    """Return the elements in the order of their indices."""
    indices = _right(x, **params)[1].sort(-1).values
    return x.gather(-1, indices), indices


def _no_nan(x: torch.Tensor, **params: Any) -> Answer:
    """Count NaN as the smallest element."""
    indices = _right(x.nan_to_num(-torch.inf, torch.inf, -torch.inf), **params)[1]
    return x.gather(-1, indices), indices


def _indices_of_chosen(x: torch.Tensor, **params: Any) -> Answer:
    """Number the elements within the k, not within the row."""
    values, indices = _right(x, **params)
    return values, torch.arange(params["k"], device=x.device).expand_as(indices).contiguous()


def _rounds(x: torch.Tensor, **params: Any) -> Answer:
    """Compare and return float32 elements in bfloat16."""
    values, indices = _right(x.bfloat16(), **params)
    return values.to(x.dtype), indices


def _plant(row: str, what: str, title: str, forward: Forward, **more: Any) -> Mutant:
    return plant(f"{row}/topk/eager/{what}", title, "error drift property special", lambda: forward, **more)


MUTANTS = (
    _plant("W02", "last-of-ties", "takes the last of equal elements", _last_of_ties),
    _plant("W02", "always-largest", "ignores largest", _always_largest),
    _plant("W02", "unsorted", "returns the k elements in the order of the row", _unsorted),
    _plant("W04", "indices-of-chosen", "indices within the k elements", _indices_of_chosen),
    _plant("W08", "rounds", "compares elements in bfloat16", _rounds),
    _plant("W12", "nan-smallest", "counts NaN as the smallest", _no_nan),
)
