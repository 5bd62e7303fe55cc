"""The k largest elements composed of torch calls: k rounds, each takes the largest word that is left.

An element and its index make one int64 word, so that no two words of a row are equal and their order is that
of the elements, with the lower index first.
"""

from __future__ import annotations

import torch

from weft.core import Implementation, WeftError
from weft.ops.topk.spec import backward

NONE_LEFT = -(1 << 63)  # below every word
MAX_COLUMNS = 1 << 32


def words_of(x: torch.Tensor, largest: bool) -> torch.Tensor:
    """Return int64 words: the element as a sortable int32 above, the complement of the index below."""
    columns = x.shape[-1]
    if columns > MAX_COLUMNS:
        raise WeftError(
            "topk: columns", expected=f"at most {MAX_COLUMNS}", got=columns, hint="use impl='cuda'"
        )
    bits = (x.float() + 0.0).view(torch.int32)  # -0 + 0 is 0
    # Negative floats have their larger magnitudes above: the bits below the sign are inverted.
    keys = torch.where(x.isnan(), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    if not largest:
        keys = ~keys
    return keys * MAX_COLUMNS + (MAX_COLUMNS - 1 - torch.arange(columns, device=x.device))


def chosen(x: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements and the indices of words."""
    indices = MAX_COLUMNS - 1 - (words & (MAX_COLUMNS - 1))
    return x.gather(-1, indices), indices


def forward(x: torch.Tensor, *, k: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    words = words_of(x, largest)
    best = [words[..., :0]]
    for _ in range(k):
        top = words.amax(-1, keepdim=True)
        best.append(top)
        words = words.masked_fill(words == top, NONE_LEFT)
    return chosen(x, torch.cat(best, -1))


IMPLEMENTATION = Implementation(
    operator="topk",
    backend="eager",
    forward=forward,
    backward=backward,
    idea="k rounds of the maximum over words of element and index",
)
