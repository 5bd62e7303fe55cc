"""The sizes of terms before they cancel, which their rounding errors go by: of GELU's slope.

gelu'(v) = (1 + t) / 2 + v (1 - t^2) u' / 2 with t = tanh(u). The two terms cancel near v = -0.75,
and 1 - t^2 does in the tail, until t is 1 in every dtype, from |u| = 10 on.
"""

from __future__ import annotations

import math

import torch


def slope_terms(v: torch.Tensor) -> torch.Tensor:
    """(1 + t) / 2 + |v| u' / 2 for float64 ``v`` of any shape."""
    u = math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * v**2)
    bends = torch.where(u.abs() < 10, v.abs() * slope, 0.0)
    return 0.5 * (1 + torch.tanh(u)) + 0.5 * bends


def finite(terms: torch.Tensor) -> torch.Tensor:
    """The terms with 0 where they are NaN or infinite: what stands there is compared by place."""
    return terms.nan_to_num_(nan=0.0, posinf=0.0)
