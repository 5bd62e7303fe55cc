"""What a call of attention leaves out, completed: lengths that none has read, and who computes."""

from __future__ import annotations

from typing import Any

import torch


def completed(
    x: Any, key_lengths: torch.Tensor | None, dropout_p: float, impl: str | None
) -> tuple[torch.Tensor | None, str | None]:
    """(lengths for the operator, the implementation) of a call whose queries are (of) ``x``."""
    lengths = key_lengths
    if isinstance(x, torch.Tensor):
        if lengths is None:  # a stand-in that no implementation reads
            lengths = x.new_empty(x.shape[:1], dtype=torch.int32)
        if impl is None and (key_lengths is not None or dropout_p):
            impl = "triton" if x.is_cuda else "eager"
    return lengths, impl
