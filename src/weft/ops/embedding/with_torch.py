"""Embedding by PyTorch: F.embedding and an addition."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops.embedding.with_eager import gather


def forward(weight: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    y = gather(weight, ids)
    return y + positions[: ids.shape[1]] if positions.shape[0] else y


def backward(
    grad: torch.Tensor, ids: torch.Tensor, vocabulary: int, places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what autograd would, and an empty gradient if there are no positions."""
    if not grad.shape[2]:  # see gather
        return grad.new_empty((vocabulary, 0)), grad.new_empty((places, 0))
    # The call that autograd makes: no padding index (-1), and no scaling by frequency.
    dweight = torch.ops.aten.embedding_dense_backward(grad, ids, vocabulary, -1, False)
    if not places:
        return dweight, grad.new_empty((0, grad.shape[2]))
    dpositions = grad.sum(0)
    # Positions past the sequence's length get gradients of zero.
    if places > ids.shape[1]:
        wide = grad.new_zeros((places, grad.shape[2]))
        wide[: ids.shape[1]] = dpositions
        dpositions = wide
    return dweight, dpositions


IMPLEMENTATION = Implementation(
    operator="embedding",
    backend="torch",
    forward=forward,
    backward=backward,
    idea="F.embedding, then add",
)
