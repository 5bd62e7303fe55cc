"""Five-point stencil with faults: borders that wrap, exchanged neighbours, lost rows, spread NaN."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.workbench.selftest.mutants.planting import after, honest, plant

ROLLS = ((1, -2), (-1, -2), (1, -1), (-1, -1))  # that bring each neighbour to the cell
STRIP = 16


def _right(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return honest("stencil")(x, weights)  # type: ignore[no-any-return]


def _wraps(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Take the neighbour from the other end of the grid."""
    y = x.float() * weights[0].float()
    for (shift, dim), weight in zip(ROLLS, weights[1:].float(), strict=True):
        y = y + x.float().roll(shift, dim) * weight
    return y.to(x.dtype, memory_format=torch.contiguous_format)


def _wraps_rows(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Take the last cell of the row before as the first cell's western neighbour."""
    y = _right(x, weights).float()
    if x.shape[-1]:
        ends = F.pad(x[..., :-1, -1], (1, 0)) if x.shape[-2] else x[..., -1]
        y[..., 0] += ends.float() * weights[3].float()
    return y.to(x.dtype)


def _exchanged(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Exchange the northern and the southern coefficient."""
    return _right(x, weights[[0, 2, 1, 3, 4]])


def _columns_first(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Take the coefficients in the order centre, west, east, north, south."""
    return _right(x, weights[[0, 3, 4, 1, 2]])


def _no_last_column(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Leave out the columns after the last whole vector of four."""
    y = _right(x, weights)
    y[..., x.shape[-1] // 4 * 4 :] = 0
    return y


def _no_halo(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute each strip of rows as a grid of its own."""
    strips = x.split(STRIP, -2) if x.shape[-2] else (x,)
    return torch.cat([_right(strip, weights) for strip in strips], -2)


def _by_convolution(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply the corners by 0: NaN reaches the diagonal neighbours."""
    c, n, s, w, e = weights.double().unbind()
    zero = torch.zeros_like(c)
    kernel = torch.stack((zero, n, zero, w, c, e, zero, s, zero)).view(1, 1, 3, 3)
    if x.numel() == 0:
        return _right(x, weights)
    grids = x.double().reshape(-1, 1, *x.shape[-2:])
    return F.conv2d(grids, kernel, padding=1).view(x.shape).to(x.dtype)


def _in_dtype(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Round each product to bfloat16."""
    return _right(x.bfloat16().float(), weights.bfloat16().float()).to(x.dtype)


def _gradients(grad: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (x, weights)]
        return [g.contiguous() for g in torch.autograd.grad(_right(*inputs), inputs, grad)]


def _same_neighbours(grad: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute x's gradient as the stencil of the gradient, its neighbours not exchanged."""
    return _right(grad, weights), _gradients(grad, x, weights)[1]


def _no_last_tile(grad: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Leave the last rows of a grid out of the coefficients' sums."""
    dx, _ = _gradients(grad, x, weights)
    whole = x.shape[-2] // STRIP * STRIP
    cut = grad.clone()
    cut[..., whole:, :] = 0
    return dx, _gradients(cut, x, weights)[1]


MUTANTS = (
    plant("W04/stencil/eager/wraps", "a grid whose ends are neighbours", "error property",
          lambda: _wraps),
    plant("W04/stencil/eager/wraps-rows", "a row's end is beside the start of the next", "error property",
          lambda: _wraps_rows),
    plant("W02/stencil/eager/exchanged", "north and south exchanged", "error property", lambda: _exchanged),
    plant("W02/stencil/eager/columns-first", "coefficients in another order", "error property",
          lambda: _columns_first),
    plant("W04/stencil/eager/no-last-column", "leaves out the last columns", "error drift property",
          lambda: _no_last_column),
    plant("W04/stencil/eager/no-halo", "strips without the rows beside them", "error drift property",
          lambda: _no_halo),
    plant("W08/stencil/eager/bf16-inside", "cells rounded to bfloat16", "error drift property",
          lambda: _in_dtype),
    plant("W12/stencil/eager/by-convolution", "NaN reaches diagonal neighbours", "special",
          lambda: _by_convolution),
    plant("W12/stencil/eager/no-nan", "0 for NaN", "special property", after("stencil", torch.nan_to_num)),
    plant("W22/stencil/eager/same-neighbours", "a gradient with neighbours as they were", "error property",
          lambda: _right, backward=lambda: _same_neighbours, only="backward"),
    plant("W22/stencil/eager/no-last-tile", "coefficients' gradients miss the last rows", "error property",
          lambda: _right, backward=lambda: _no_last_tile, only="backward"),
)  # fmt: skip
