"""Sizes of a gradient's terms before they cancel: the scale of their rounding errors.

GELU's slope is gelu'(v) = (1 + t) / 2 + v (1 - t^2) u' / 2 with t = tanh(u). The two terms cancel near
v = -0.75. In the tail 1 - t^2 cancels too, until t rounds to 1 in every dtype, from |u| = 10 on.
"""

from __future__ import annotations

import math

import torch


def gelu_slope_terms(v: torch.Tensor) -> torch.Tensor:
    """Return (1 + t) / 2 + |v| u' / 2 for float64 ``v`` of any shape."""
    u = math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)
    du_dv = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * v**2)
    curvature_term = torch.where(u.abs() < 10, v.abs() * du_dv, 0.0)
    return 0.5 * (1 + torch.tanh(u)) + 0.5 * curvature_term


def zero_nonfinite(terms: torch.Tensor) -> torch.Tensor:
    """Replace NaN and infinite terms by 0, in place: the check compares such elements by position."""
    return terms.nan_to_num_(nan=0.0, posinf=0.0)
