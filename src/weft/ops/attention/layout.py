"""Memory of (B, H, T, D) tensors: columns side by side, and outputs that lie as the queries do."""

from __future__ import annotations

import math

import torch


def rowwise(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied only where a row's columns do not lie side by side."""
    return x if x.stride(3) == 1 else x.contiguous()


def like(x: torch.Tensor) -> torch.Tensor:
    """Memory for an answer of the shape of ``x``: contiguous, or (B, T, H, D) if so ``x`` lies.

    A model's heads are views of (B, T, H D): what is joined to that again should not be copied.
    """
    if x.stride(3) == 1 and 0 < x.stride(1) < x.stride(2):
        b, h, t, d = x.shape
        return torch.empty((b, t, h, d), dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, into: Three | None) -> Three:
    """Memory for the three gradients: ``into``, or each laid out as its tensor is."""
    return (like(q), like(k), like(v)) if into is None else into


def no_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, into: Three | None) -> Three:
    """Where there are no queries or no keys: 0, in ``into`` if given."""
    if into is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for one in into:
        one.zero_()
    return into


def nothing(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer where there are no queries or no keys: 0, and a log-sum-exp of -inf."""
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
    return torch.zeros_like(q, memory_format=torch.contiguous_format), lse
