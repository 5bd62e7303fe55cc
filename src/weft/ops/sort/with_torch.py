"""Stable sorting by the library: ``torch.sort(stable=True)``."""

from __future__ import annotations

import torch

from weft.core import FORWARD, Implementation
from weft.ops.sort.spec import backward


def forward(x: torch.Tensor, *, descending: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    # A copy of other layouts: the library's outputs have the strides of its input.
    values, indices = torch.sort(x.contiguous(), dim=-1, descending=bool(descending), stable=True)
    return values, indices


def forward_keys(x: torch.Tensor, *, descending: bool = False) -> torch.Tensor:
    return forward(x, descending=descending)[0]


SORT = Implementation(
    operator="sort",
    backend="torch",
    forward=forward,
    backward=backward,
    idea="torch.sort(stable=True)",
)
SORT_KEYS = Implementation(
    operator="sort_keys",
    backend="torch",
    forward=forward_keys,
    directions=(FORWARD,),
    idea="torch.sort(stable=True), whose indices are dropped",
)
