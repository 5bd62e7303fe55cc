"""Embedding by the library: F.embedding and an addition."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.core import Implementation


def forward(weight: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    y = F.embedding(ids, weight)
    return y + positions[: ids.shape[1]] if positions.shape[0] else y


def backward(
    grad: torch.Tensor, ids: torch.Tensor, vocabulary: int, places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What autograd does with the forward, and an empty gradient where there are no positions."""
    if grad.numel() == 0:  # on a GPU the library's kernel is not launched for nothing, and raises
        shapes = (vocabulary, grad.shape[2]), (places, grad.shape[2])
        return grad.new_zeros(shapes[0]), grad.new_zeros(shapes[1])
    dweight = torch.ops.aten.embedding_dense_backward(grad, ids, vocabulary, -1, False)
    if not places:
        return dweight, grad.new_empty((0, grad.shape[2]))
    dpositions = grad.sum(0)
    if places > ids.shape[1]:
        wide = grad.new_zeros((places, grad.shape[2]))
        wide[: ids.shape[1]] = dpositions
        dpositions = wide
    return dweight, dpositions


IMPLEMENTATION = Implementation(
    operator="embedding",
    name="torch",
    backend="torch",
    forward=forward,
    backward=backward,
    idea="F.embedding, then add",
)
