"""Memory layout of (B, H, T, D) tensors: adjacent columns, and outputs with the layout of the queries."""

from __future__ import annotations

import math

import torch

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def rowwise(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, copied only if the columns of a row are not adjacent."""
    return x if x.stride(3) == 1 else x.contiguous()


def like(x: torch.Tensor) -> torch.Tensor:
    """Allocate an output of the shape of ``x``: contiguous, or (B, T, H, D) in memory if ``x`` is.

    A model's heads are views of (B, T, H D), and merging the output's heads again should not copy it.
    """
    if x.stride(3) == 1 and 0 < x.stride(1) < x.stride(2):
        b, h, t, d = x.shape
        return torch.empty((b, t, h, d), dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def allocate_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, into: Three | None) -> Three:
    """Return memory for the three gradients: ``into``, or new tensors with the layouts of q, k and v."""
    return (like(q), like(k), like(v)) if into is None else into


def zero_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, into: Three | None) -> Three:
    """Return the gradients of a call with no queries or no keys: 0, in ``into`` if it is given."""
    if into is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for gradient in into:
        gradient.zero_()
    return into


def empty_output(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a call with no queries or no keys: 0, and a log-sum-exp of -inf."""
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
    return torch.zeros_like(q, memory_format=torch.contiguous_format), lse
