"""``mlp_gelu`` with faults: the other form of GELU, a missing bias, and wrong operands in the backward."""

from __future__ import annotations

from typing import Any

import torch

from weft.ops.linear.mlp import with_torch
from weft.ops.linear.products import to_2d
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, honest, plant

Outputs = tuple[torch.Tensor, ...]


def _error_function(x: torch.Tensor, fc: torch.Tensor, b1: torch.Tensor, *second: torch.Tensor) -> Outputs:
    """Compute GELU's exact form in place of its tanh form."""
    pre = torch.nn.functional.linear(x, fc, b1)
    hidden = torch.nn.functional.gelu(pre)
    return torch.nn.functional.linear(hidden, *second), hidden, pre


def _no_bias(
    x: torch.Tensor, fc: torch.Tensor, b1: torch.Tensor, proj: torch.Tensor, b2: torch.Tensor
) -> Outputs:
    """Leave out the second layer's bias."""
    return with_torch.forward(x, fc, b1, proj, torch.zeros_like(b2))


def _gradients(grad: torch.Tensor, dpre: torch.Tensor, *saved: torch.Tensor) -> Outputs:
    """Return the gradients that follow from ``dpre``, of any shape."""
    x, fc, _, hidden, _ = (to_2d(t) for t in saved)
    rows, dpre = to_2d(grad), to_2d(dpre)
    dx = (dpre @ fc).view(saved[0].shape)
    return dx, dpre.t() @ x, dpre.sum(0), rows.t() @ hidden, rows.sum(0)


def _dpre(grad: torch.Tensor, proj: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(torch.matmul(grad, proj), at, approximate="tanh")  # type: ignore[no-any-return]


def _slope_of_hidden(grad: torch.Tensor, *saved: torch.Tensor) -> Outputs:
    """Take GELU's slope at its output."""
    return _gradients(grad, _dpre(grad, saved[2], saved[3]), *saved)


def _sums_without_slope(grad: torch.Tensor, *saved: torch.Tensor) -> Outputs:
    """Add up the columns of the first bias's gradient before the slope multiplies them."""
    dx, dfc, _, dproj, db2 = _gradients(grad, _dpre(grad, saved[2], saved[4]), *saved)
    return dx, dfc, to_2d(torch.matmul(grad, saved[2])).sum(0), dproj, db2


def _pre_for_hidden(grad: torch.Tensor, *saved: torch.Tensor) -> Outputs:
    """Multiply the gradient with GELU's input for the second weight."""
    dx, dfc, db1, _, db2 = _gradients(grad, _dpre(grad, saved[2], saved[4]), *saved)
    return dx, dfc, db1, to_2d(grad).t() @ to_2d(saved[4]), db2


def _last_row_uncounted(grad: torch.Tensor, *saved: torch.Tensor) -> Outputs:
    """Leave the last row out of the sums for the first bias."""
    dpre = _dpre(grad, saved[2], saved[4])
    dx, dfc, _, dproj, db2 = _gradients(grad, dpre, *saved)
    return dx, dfc, to_2d(dpre)[:-1].sum(0), dproj, db2


def _wrong_forward(what: str, title: str, forward: Forward) -> Mutant:
    return plant(f"W02/mlp_gelu/eager/{what}", title, "error drift", lambda: forward)


def _wrong_backward(what: str, title: str, backward: Forward) -> Mutant:
    def make() -> Any:
        return honest("mlp_gelu")

    identity = f"W22/mlp_gelu/eager/{what}"
    return plant(identity, title, "error drift", make, backward=lambda: backward, only="backward")


MUTANTS = (
    _wrong_forward("error-function", "the exact form of GELU", _error_function),
    _wrong_forward("no-bias", "no bias of the second layer", _no_bias),
    _wrong_backward("slope-of-hidden", "GELU's slope at its output", _slope_of_hidden),
    _wrong_backward("sums-without-slope", "a bias gradient without the slope", _sums_without_slope),
    _wrong_backward("pre-for-hidden", "GELU's input for its output in a product", _pre_for_hidden),
    _wrong_backward("last-row-uncounted", "a bias gradient without the last row", _last_row_uncounted),
)
