"""Embedding by the library: F.embedding and an addition."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.core import YES, Case, Implementation, Support, no


def forward(weight: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    y = F.embedding(ids, weight)
    return y + positions[: ids.shape[1]] if positions.shape[0] else y


def backward(
    grad: torch.Tensor, ids: torch.Tensor, vocabulary: int, places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What autograd does with the forward, and an empty gradient where there are no positions."""
    dweight = torch.ops.aten.embedding_dense_backward(grad, ids, vocabulary, -1, False)
    if not places:
        return dweight, grad.new_empty((0, grad.shape[2]))
    dpositions = grad.sum(0)
    if places > ids.shape[1]:
        wide = grad.new_zeros((places, grad.shape[2]))
        wide[: ids.shape[1]] = dpositions
        dpositions = wide
    return dweight, dpositions


def supports(case: Case, device: str) -> Support:
    if device == "cuda" and case.inputs[0].shape[-1] == 0:
        return no("the library's backward over rows of no columns breaks the device's context")
    return YES


IMPLEMENTATION = Implementation(
    operator="embedding",
    name="torch",
    backend="torch",
    forward=forward,
    backward=backward,
    supports=supports,
    idea="F.embedding, then add",
)
