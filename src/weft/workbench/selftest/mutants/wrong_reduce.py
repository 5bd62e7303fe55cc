"""Reductions along dimensions with faults: NaN, ties, counts, lost elements, the wrong dimension."""

from __future__ import annotations

from typing import Any

import torch

from weft.ops.reduce.spec import backward, dims, extents
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, honest, plant

VEC = 4


def _right(x: torch.Tensor, **params: Any) -> torch.Tensor:
    return honest("reduce")(x, **params)  # type: ignore[no-any-return]


def _right_index(x: torch.Tensor, **params: Any) -> torch.Tensor:
    return honest("argreduce")(x, **params)  # type: ignore[no-any-return]


def _no_nan(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    """Drop NaN, as a maximum of hardware does that returns the number beside it."""
    lowest = {"amax": -torch.inf, "amin": torch.inf}.get(op, torch.nan)
    return _right(torch.where(x.isnan(), lowest, x), op=op, first=first, last=last)


def _mean_of_parts(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    """Divide by the elements of the first reduced dimension alone."""
    y = _right(x, op="sum" if op == "mean" else op, first=first, last=last)
    return y / x.shape[first] if op == "mean" else y


def _mean_of_vectors(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    """Divide by n rounded up to whole vectors."""
    n = extents(x.shape, first, last)[1]
    y = _right(x, op=op, first=first, last=last)
    return (y.float() * n / (-(-n // VEC) * VEC)).to(y.dtype) if op == "mean" and n else y


def _no_last_vector(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    """Leave out the elements after the last whole vector of a long enough row."""
    flat = x.flatten(first, last)
    n = flat.shape[first]
    whole = n // VEC * VEC if n > VEC else n
    return _right(flat.narrow(first, 0, whole), op=op, first=first, last=first)


def _in_dtype(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    """Keep a running sum in the input's own 16 bits."""
    if x.dtype == torch.float32 or op != "sum" or not x.numel():
        return _right(x, op=op, first=first, last=last)
    flat = x.flatten(first, last).movedim(first, 0)
    total = torch.zeros_like(flat[0])
    for piece in flat:
        total = total + piece
    return total.contiguous()


def _no_scaling(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    """Exponentiate the elements as they are."""
    if op != "logsumexp":
        return _right(x, op=op, first=first, last=last)
    return x.float().exp().sum(dims(first, last)).log().to(x.dtype)


def _infinite_less_infinite(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    """Subtract the largest element also where it is infinite."""
    if op != "logsumexp" or not x.numel():
        return _right(x, op=op, first=first, last=last)
    wide = x.float().flatten(first, last)
    largest = wide.amax(first, keepdim=True)
    return ((wide - largest).exp().sum(first).log() + largest.squeeze(first)).to(x.dtype)


def _always_largest(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    return _right(x, op="amax" if op == "amin" else op, first=first, last=last)


def _whole_gradient_to_ties(grad: torch.Tensor, x: Any, y: Any, shape: Any, **params: Any) -> Any:
    """Give each of the elements that tie the whole gradient."""
    if params["op"] not in ("amax", "amin"):
        return backward(grad, x, y, shape, **params)
    outer, n, inner = extents(shape, params["first"], params["last"])
    is_result = x.reshape(outer, n, inner) == y.reshape(outer, 1, inner)
    return ((grad.reshape(outer, 1, inner) * is_result).reshape(shape),)


def _undivided_gradient(grad: torch.Tensor, x: Any, y: Any, shape: Any, **params: Any) -> Any:
    """Give the mean the gradient of the sum."""
    op = "sum" if params["op"] == "mean" else params["op"]
    return backward(grad, x, y, shape, **{**params, "op": op})


def _last_of_ties(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    flat = x.flatten(first, last)
    return flat.shape[first] - 1 - _right_index(flat.flip(first), op=op, first=first, last=first)


def _index_without_nan(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    lowest = -torch.inf if op == "argmax" else torch.inf
    wide = torch.where(x.isnan(), lowest, x) if x.is_floating_point() else x
    return _right_index(wide, op=op, first=first, last=last)


def _index_in_last_dimension(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    """Number the elements within the last of the reduced dimensions."""
    return _right_index(x, op=op, first=first, last=last) % x.shape[last]


def _index_in_few_bits(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    """Number the elements in seven bits, so that long rows have wrong indices."""
    return _right_index(x, op=op, first=first, last=last) % 128


def _rounds(x: torch.Tensor, **params: Any) -> torch.Tensor:
    """Compare elements in bfloat16."""
    return _right_index(x.bfloat16() if x.is_floating_point() else x, **params)


def _plant(row: str, what: str, title: str, forward: Forward, **more: Any) -> Mutant:
    return plant(f"{row}/reduce/eager/{what}", title, "error drift property special", lambda: forward, **more)


def _plant_index(row: str, what: str, title: str, forward: Forward) -> Mutant:
    killed_by = "error drift property special"
    return plant(f"{row}/argreduce/eager/{what}", title, killed_by, lambda: forward)


MUTANTS = (
    _plant("W12", "no-nan", "drops NaN from a maximum", _no_nan),
    _plant("W12", "inf-less-inf", "subtracts an infinite largest element", _infinite_less_infinite),
    _plant("W03", "mean-of-parts", "divides a mean by one of two reduced dimensions", _mean_of_parts),
    _plant("W03", "mean-of-vectors", "divides a mean by the elements of whole vectors", _mean_of_vectors),
    _plant("W04", "no-last-vector", "leaves out the end of a row", _no_last_vector),
    _plant("W08", "in-dtype", "a running sum in 16 bits", _in_dtype),
    _plant("W09", "no-scaling", "exponentials that are not scaled", _no_scaling),
    _plant("W02", "always-largest", "returns the largest for the smallest", _always_largest),
    _plant("W22", "whole-gradient-to-ties", "gives each tied element the whole gradient", _right,
           backward=lambda: _whole_gradient_to_ties, only="backward"),
    _plant("W22", "undivided-gradient", "gives a mean the gradient of a sum", _right,
           backward=lambda: _undivided_gradient, only="backward"),
    _plant_index("W02", "last-of-ties", "the index of the last of equal elements", _last_of_ties),
    _plant_index("W12", "index-without-nan", "counts NaN as no element", _index_without_nan),
    _plant_index("W04", "last-dimension", "an index within the last dimension", _index_in_last_dimension),
    _plant_index("W04", "few-bits", "an index of seven bits", _index_in_few_bits),
    _plant_index("W08", "rounds-elements", "compares elements in bfloat16", _rounds),
)  # fmt: skip
