"""Strides: what elementwise kernels, which walk memory and not rows, need of their arguments."""

from __future__ import annotations

import torch


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` with no gaps between its elements, in the stride order that ``empty_like`` gives.

    A transposed tensor is dense as it stands; a slice or an expanded row is copied.
    """
    if x.is_contiguous():
        return x
    like = torch.empty_like(x)
    return x if x.stride() == like.stride() else like.copy_(x)


def aligned_with(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``grad`` with the strides of a dense ``x``, copied only where it has others."""
    return grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)


def flat(x: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in storage order, as a view of shape ``(numel,)``."""
    return x.as_strided((x.numel(),), (1,))
