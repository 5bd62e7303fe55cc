"""The k largest elements by the library: ``torch.topk`` of words that hold the element and its index.

``torch.topk`` of the elements themselves leaves the order of ties open; no two of the words are equal.
"""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops.topk.spec import backward
from weft.ops.topk.with_eager import chosen, words_of


def forward(x: torch.Tensor, *, k: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    return chosen(x, torch.topk(words_of(x, largest), k, -1).values)


IMPLEMENTATION = Implementation(
    operator="topk",
    backend="torch",
    forward=forward,
    backward=backward,
    idea="torch.topk of words of element and index, which have no ties",
)
