"""Transpose by the library: a contiguous clone of the swapped view."""

from __future__ import annotations

import torch

from weft.core import Implementation


def forward(x: torch.Tensor) -> torch.Tensor:
    # clone() of the view and not contiguous(), which would return x's own memory where x is transposed.
    return x.transpose(-1, -2).clone(memory_format=torch.contiguous_format)


def backward(grad: torch.Tensor) -> tuple[torch.Tensor]:
    """Return the transpose of the gradient in memory of its own; autograd's is a view of the gradient."""
    return (forward(grad),)


IMPLEMENTATION = Implementation(
    operator="transpose",
    backend="torch",
    forward=forward,
    backward=backward,
    idea="x.transpose(-1, -2).clone()",
)
