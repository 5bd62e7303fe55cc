"""Sparse products with faults: lost carries, wrong row ends, columns cut to seven bits, sums in 16 bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.core import registry
from weft.core.implementation import anywhere
from weft.ops.sparse.transpose import Transposition, transpose
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, plant

TILE = 32  # nonzeros of a block's share


def _right(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    forward = registry.implementation("spmv" if dense.dim() == 1 else "spmm", "eager").forward
    return forward(values, columns, offsets, dense)  # type: ignore[no-any-return]


def _without(values: Tensor, dropped: Tensor) -> Tensor:
    """Return the values with 0 at the nonzeros that a fault loses."""
    return values.masked_fill(dropped, 0)


def _no_carry(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Lose the sums of a row's earlier tiles: a row has the nonzeros of the tile in which it ends."""
    at = torch.arange(values.shape[0], device=values.device)
    row = torch.searchsorted(offsets.long(), at, right=True) - 1
    last = offsets.long()[1:][row] - 1
    return _right(_without(values, at // TILE != last // TILE), columns, offsets, dense)


def _late_split(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Give the last nonzero of each tile to the row after its own."""
    moved = offsets.clone()
    inner = moved[1:-1]
    inner[inner % TILE == 0] -= (inner[inner % TILE == 0] > offsets[:-2][inner % TILE == 0]).to(inner.dtype)
    return _right(values, columns, moved, dense)


def _first_lanes(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Read at most 32 nonzeros of a row, one a lane."""
    at = torch.arange(values.shape[0], device=values.device)
    row = torch.searchsorted(offsets.long(), at, right=True) - 1
    return _right(_without(values, at - offsets.long()[row] >= 32), columns, offsets, dense)


def _unwritten_rows(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Leave the outputs of empty rows as the memory was."""
    y = _right(values, columns, offsets, dense)
    output = torch.empty_like(y)
    filled = offsets[1:] > offsets[:-1]
    output[filled] = y[filled]
    return output


def _no_duplicates(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Let the last of several nonzeros with one place replace the ones before it."""
    size = max(dense.shape[0], 1)
    at = torch.arange(values.shape[0], device=values.device)
    row = torch.searchsorted(offsets.long(), at, right=True) - 1
    cells = row * size + columns
    last = torch.zeros((offsets.shape[0] - 1) * size, dtype=torch.int64, device=values.device)
    last.scatter_reduce_(0, cells, at, "amax")
    return _right(_without(values, last[cells] != at), columns, offsets, dense)


def _seven_bits(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Keep columns in seven bits."""
    return _right(values, columns & 127, offsets, dense)


def _in_dtype(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Add up the products one after another in the dtype of the values."""
    y = dense.new_zeros((offsets.shape[0] - 1, *dense.shape[1:]))
    bounds = offsets.tolist()
    for row, (begin, end) in enumerate(pairwise(bounds)):
        for k in range(begin, end):
            y[row] += values[k] * dense[int(columns[k])]
    return y


def _half_values(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    return _right(values.bfloat16().to(values.dtype), columns, offsets, dense)


def _skips_zeros(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Skip what is multiplied by 0: 0 times NaN or Inf becomes 0."""
    return _right(values, columns, offsets, torch.where(dense.isfinite(), dense, 0))


def _backward(grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor]:
    backward = registry.implementation("spmv" if grad.dim() == 1 else "spmm", "torch").backward
    assert backward is not None
    # The library takes no 16-bit types on a CPU.
    values, columns, offsets, dense = saved
    gradients = backward(grad.float(), values.float(), columns, offsets, dense.float())
    return gradients[0].to(grad.dtype), gradients[1].to(grad.dtype)


def _one_gradient_a_column(
    grad: Tensor, values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor
) -> tuple[Tensor, Tensor]:
    """Store where the gradient of the dense factor must add: one nonzero of each column counts."""
    dvalues, ddense = _backward(grad, values, columns, offsets, dense)
    row = (
        torch.searchsorted(offsets.long(), torch.arange(values.shape[0], device=grad.device), right=True) - 1
    )
    scale = values if grad.dim() == 1 else values[:, None]
    stored = torch.zeros_like(ddense)
    stored[columns.long()] = scale * grad[row]
    return dvalues, stored


def _cached_by_address() -> Forward:
    """Return a backward that keeps the transposition by the addresses and sizes of its pattern."""
    transpositions: dict[tuple[int, ...], Transposition] = {}

    def backward(
        grad: Tensor, values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor
    ) -> tuple[Tensor, Tensor]:
        key = columns.data_ptr(), columns.shape[0], offsets.data_ptr(), offsets.shape[0]
        if key not in transpositions:
            transpositions[key] = transpose(columns.clone(), offsets.clone(), dense.shape[0])
        dvalues, _ = _backward(grad, values, columns, offsets, dense)
        t = transpositions[key]
        return dvalues, _right(values[t.order], t.columns, t.offsets, grad)

    return backward


def _plant(
    row: str, operator: str, what: str, title: str, killed_by: str, forward: Forward, **more: Any
) -> Mutant:
    mutant = plant(f"{row}/{operator}/eager/{what}", title, killed_by, lambda: forward, **more)
    # The library takes no 16-bit types on a CPU, where sums in 16 bits must show too.
    return replace(mutant, make=lambda: replace(mutant.make(), supports=anywhere))


WRONG = "error drift property special"
MUTANTS = (
    _plant("W04", "spmv", "no-carry", "a row without its earlier tiles", WRONG, _no_carry),
    _plant("W04", "spmv", "late-split", "a tile's last nonzero in the next row", WRONG, _late_split),
    _plant("W04", "spmv", "first-lanes", "at most 32 nonzeros of a row", WRONG, _first_lanes),
    _plant("W04", "spmm", "no-carry", "a row without its earlier tiles", WRONG, _no_carry),
    _plant("W01", "spmv", "unwritten", "empty rows are not written", "written " + WRONG, _unwritten_rows),
    _plant("W17", "spmv", "seven-bits", "columns in seven bits", WRONG, _seven_bits),
    _plant("W02", "spmv", "no-duplicates", "a repeated column replaces", WRONG, _no_duplicates),
    _plant("W08", "spmv", "in-dtype", "sums in 16 bits", "error drift property", _in_dtype),
    _plant("W08", "spmv", "bf16-values", "values in bfloat16", "error drift property", _half_values),
    _plant("W12", "spmv", "skips-zeros", "0 for 0 times NaN", "special property", _skips_zeros,
           only="special"),
    _plant("W22", "spmv", "no-add", "a gradient that stores and does not add", "error property", _right,
           backward=lambda: _one_gradient_a_column, only="backward"),
    _plant("C01", "spmv", "stale-transposition", "a transposition of columns that have changed",
           "error again property", _right, backward=_cached_by_address, only="backward"),
)  # fmt: skip
