"""Transpose with faults: a copy, parts of tiles, one matrix of many, other bits, a view, a lost gradient."""

from __future__ import annotations

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, after, honest, plant

TILE = 32


def _right(x: torch.Tensor) -> torch.Tensor:
    return honest("transpose")(x)  # type: ignore[no-any-return]


def _reshaped(x: torch.Tensor) -> torch.Tensor:
    """Return the elements in their old order under the new shape."""
    return x.clone(memory_format=torch.contiguous_format).view(*x.shape[:-2], x.shape[-1], x.shape[-2])


def _whole_tiles(x: torch.Tensor) -> torch.Tensor:
    """Leave out the rows of x after the last whole tile."""
    y = _right(x)
    if x.shape[-2] > TILE:
        y[..., x.shape[-2] // TILE * TILE :] = 0
    return y


def _first_matrix(x: torch.Tensor) -> torch.Tensor:
    """Return the first matrix in each place of a batch."""
    y = _right(x)
    return y[(0,) * (y.dim() - 2)].expand_as(y).contiguous() if y.dim() > 2 and y.numel() else y


def _as_if_dense(x: torch.Tensor) -> torch.Tensor:
    """Read x as if its elements lay one after another in memory."""
    base = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    if x.is_contiguous() or base.numel() < x.storage_offset() + x.numel():
        return _right(x)
    return _right(base[x.storage_offset() :][: x.numel()].view(x.shape))


def _tile_in_place(x: torch.Tensor) -> torch.Tensor:
    """Transpose tiles of 8 x 8 within themselves, and leave them where they are."""
    y = _right(x)
    if x.dim() == 2 and x.shape[0] >= 16 and x.shape[1] >= 16:
        y[:8, 8:16], y[8:16, :8] = _right(x[:8, 8:16]), _right(x[8:16, :8])
    return y


def _plain_zeros(y: torch.Tensor) -> torch.Tensor:
    """Write 0.0 for -0.0, as y + 0 does."""
    return y + 0 if y.is_floating_point() else y


def _through_half(y: torch.Tensor) -> torch.Tensor:
    return y.bfloat16().to(y.dtype) if y.dtype == torch.float32 else y


def _view(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2)


def _plant(row: str, what: str, title: str, killed_by: str, forward: Forward, **more: object) -> Mutant:
    return plant(f"{row}/transpose/eager/{what}", title, killed_by, lambda: forward, **more)  # type: ignore[arg-type]


MUTANTS = (
    _plant("W02", "reshape", "the old order under the new shape", "error property", _reshaped),
    _plant("W02", "no-swap", "tiles beside the diagonal in each other's place", "error property",
           _tile_in_place),
    _plant("W03", "view", "returns a view of its input", "layout alias", _view),
    _plant("W04", "whole-tiles", "leaves out rows after the last whole tile", "error property", _whole_tiles),
    _plant("W04", "one-matrix", "the first matrix for all", "error property", _first_matrix),
    _plant("W06", "as-dense", "assumes contiguous rows", "error property", _as_if_dense),
    plant("W08/transpose/eager/bf16-inside", "moves elements as bfloat16", "error property",
          after("transpose", _through_half)),
    plant("W12/transpose/eager/no-sign", "0 for -0", "property", after("transpose", _plain_zeros)),
    plant("W12/transpose/eager/no-nan", "0 for NaN", "special property",
          after("transpose", torch.nan_to_num)),
    _plant("W22", "as-it-is", "a gradient in the output's order", "error property", _right,
           backward=lambda: lambda grad: (_reshaped(grad),), only="backward"),
)  # fmt: skip
