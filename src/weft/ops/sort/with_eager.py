"""Stable sorting composed of torch calls: a radix sort by one bit at a time.

Each round keeps the order within the elements whose bit is 0 and within those whose bit is 1, and moves the
latter behind the former. Their places follow from a cumulative sum (G. Blelloch, "Prefix sums and their
applications", CMU-CS-90-190, 1990: the split operation).
"""

from __future__ import annotations

import torch

from weft.core import FORWARD, Implementation
from weft.ops.sort.spec import BITS, backward


def ordered_keys(x: torch.Tensor, descending: bool) -> tuple[torch.Tensor, int]:
    """Return int64 keys in the order of the output, and how many bits of them, from the lowest, differ."""
    bits = 8 * x.element_size()
    keys = x.detach().view(BITS[x.element_size()])
    if x.is_floating_point():
        # Negative floats have their larger magnitudes above: the bits below the sign are inverted.
        most = (1 << (bits - 1)) - 1
        keys = (keys ^ ((keys >> (bits - 1)) & most)).masked_fill(x == 0, 0).masked_fill(x.isnan(), most)
    keys = keys.to(torch.int64)
    return (~keys if descending else keys), bits


def order_of(x: torch.Tensor, descending: bool) -> torch.Tensor:
    """Return the index of each element of the sorted rows."""
    keys, bits = ordered_keys(x, descending)
    at = torch.arange(x.shape[-1], device=x.device)
    indices = torch.zeros_like(keys) + at
    for bit in range(bits):
        # The sign comes last, and negative numbers, whose bit is 1, come first.
        is_behind = (keys >> bit & 1) ^ (bit == bits - 1)
        in_front = (1 - is_behind).cumsum(-1)  # of each element, itself included
        behind_at = in_front[..., -1:] + at - in_front
        places = torch.where(is_behind == 0, in_front - 1, behind_at)
        # Out of place, for torch.vmap.
        keys, indices = keys.scatter(-1, places, keys), indices.scatter(-1, places, indices)
    return indices


def forward(x: torch.Tensor, *, descending: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    indices = order_of(x, descending)
    return x.gather(-1, indices), indices


def forward_keys(x: torch.Tensor, *, descending: bool = False) -> torch.Tensor:
    return forward(x, descending=descending)[0]


SORT = Implementation(
    operator="sort",
    backend="eager",
    forward=forward,
    backward=backward,
    idea="a radix sort by single bits, with places from cumulative sums",
)
SORT_KEYS = Implementation(
    operator="sort_keys",
    backend="eager",
    forward=forward_keys,
    directions=(FORWARD,),
    idea="a radix sort by single bits, with places from cumulative sums",
)
